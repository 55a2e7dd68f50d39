from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from run_files import write_project

import paceline
from paceline import build
from paceline.api import _in_thread
from paceline.build import EvalReport, RunResult
from paceline.config import RunFile
from paceline.errors import ConfigError, RolloutError
from paceline.types import Prompt


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with prompts and a reward file."""
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunFile, dict[str, Any]]]:
    """Replaces training and evals; holds what they were called with."""
    made: list[tuple[RunFile, dict[str, Any]]] = []

    def train(run_file: RunFile, **options: Any) -> RunResult:
        made.append((run_file, options))
        return RunResult(run_file.run_dir, 1, 1)

    def evaluate(run_file: RunFile, **options: Any) -> EvalReport:
        made.append((run_file, options))
        return EvalReport("w", {})

    monkeypatch.setattr(build, "train", train)
    monkeypatch.setattr(build, "evaluate", evaluate)
    return made


def reward(completion: str) -> float:
    return float(len(completion))


Calls = list[tuple[RunFile, dict[str, Any]]]


def test_files_and_names_become_settings(project: Path, calls: Calls) -> None:
    paceline.train("org/model", "prompts.jsonl", "exact", num_steps=2)
    run_file, options = calls[0]
    assert run_file.data is not None
    assert run_file.data.path == "prompts.jsonl"
    assert run_file.reward.kind == "exact"
    assert run_file.run.num_steps == 2
    assert options == {}


def test_objects_are_handed_over(project: Path, calls: Calls) -> None:
    rows = ({"prompt": text} for text in ("a", "b"))
    paceline.train("org/model", rows, reward, num_steps=20, eval_prompts=["c"])
    run_file, options = calls[0]
    assert options["prompts"] == [{"prompt": "a"}, {"prompt": "b"}]
    assert options["reward"] is reward
    assert options["eval_prompts"] == ["c"]
    assert run_file.evals.every == 2


def test_settings_come_dotted_or_as_blocks(project: Path, calls: Calls) -> None:
    paceline.train(
        Path("org/model"),
        ["a"],
        reward,
        num_epochs=2,
        settings={"trainer.lr": 1e-3, "rollout": {"prompts_per_step": 1}},
        trainer={"weight_decay": 0.1},
    )
    run_file, _ = calls[0]
    assert run_file.trainer.lr == 1e-3
    assert run_file.trainer.weight_decay == 0.1
    assert run_file.rollout.prompts_per_step == 1


def test_a_file_of_eval_prompts_becomes_a_set(project: Path, calls: Calls) -> None:
    paceline.train("org/model", ["a"], "exact", num_steps=5, eval_prompts="prompts.jsonl")
    evals = calls[0][0].evals
    assert [eval_set.name for eval_set in evals.sets] == ["eval"]
    assert evals.every == 1


def test_a_run_without_a_name_gets_a_folder_of_its_own(project: Path, calls: Calls) -> None:
    paceline.train("org/model", ["a"], reward, num_steps=1)
    (project / "runs" / "run-1").mkdir(parents=True)
    paceline.train("org/model", ["a"], reward, num_steps=1)
    paceline.train("org/model", ["a"], reward, num_steps=1, name="mine")
    paceline.train("org/model", ["a"], reward, num_steps=1, run={"name": "yours"})
    names = [run_file.run.name for run_file, _ in calls]
    assert names == ["run-1", "run-2", "mine", "yours"]
    assert calls[0][0].run_dir == project / "runs" / "run-1"


def test_sft_needs_no_reward(project: Path, calls: Calls) -> None:
    paceline.sft("org/model", [{"prompt": "a", "completion": "b"}], num_steps=1)
    assert getattr(calls[0][0].algorithm, "kind", None) == "sft"


def test_evaluate(project: Path, calls: Calls) -> None:
    paceline.evaluate("org/model", ["a"], reward)
    options = calls[0][1]
    assert options == {"weights": None, "reward": reward, "eval_prompts": ["a"]}
    paceline.evaluate("org/model", "prompts.jsonl", "exact")
    assert calls[1][0].evals.sets[0].name == "eval"


@pytest.mark.parametrize("rows", [{"prompt": "1"}, Prompt("a", text="1"), 5, b"1"])
def test_one_row_is_not_taken_for_a_list_of_rows(project: Path, calls: Calls, rows: Any) -> None:
    with pytest.raises(ConfigError, match=r"^prompts: found .*; pass a list, such as"):
        paceline.train("org/model", rows, reward, num_steps=1)
    with pytest.raises(ConfigError, match=r"^eval_prompts: found .*; pass a list, such as"):
        paceline.train("org/model", ["a"], reward, num_steps=1, eval_prompts=rows)
    with pytest.raises(ConfigError, match="pass a list"):
        paceline.generate("org/model", rows)
    assert calls == []


def test_a_single_chat_is_not_taken_for_a_list_of_chats(project: Path) -> None:
    chat: Any = [{"role": "user", "content": "a"}]
    with pytest.raises(ConfigError, match=r"found dict in it, allowed: texts, or chats"):
        paceline.generate("org/model", chat)


def test_an_eval_without_any_number_is_an_error(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    skipped = {"eval": "reward/ValueError: no int"}
    reports = [
        EvalReport("w", {}, skipped, {"eval": []}),
        EvalReport("w", {}, skipped, {"eval": [], "other": []}),
    ]
    monkeypatch.setattr(build, "evaluate", lambda run_file, **options: reports.pop(0))
    with pytest.raises(RolloutError, match="'eval' has no numbers: reward/ValueError: no int"):
        paceline.evaluate("org/model", ["a"], reward)
    assert paceline.evaluate("org/model", ["a"], reward).skipped == skipped
    assert "eval set 'eval' has no numbers" in caplog.text


def test_generate_takes_any_sampling(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(
        model: Any, engine: Any, prompts: list[str], sampling: Any, *, seed: int
    ) -> list[str]:
        assert (sampling.temperature, sampling.top_p, seed) == (0, 0.5, 3)
        return list(prompts)

    monkeypatch.setattr(build, "generate", generate)
    answers = paceline.generate("m", "a", temperature=0, sampling={"top_p": 0.5}, seed=3)
    assert answers == ["a"]
    with pytest.raises(ConfigError, match=r"sampling.top_pp: unknown key; did you mean `top_p`"):
        paceline.generate("m", "a", sampling={"top_pp": 0.5})


def test_errors_are_those_of_a_run_file(project: Path, calls: Calls) -> None:
    with pytest.raises(ConfigError) as info:
        paceline.train("org/model", "prompt.jsonl", trainer={"lrr": 1})
    text = str(info.value)
    assert text.startswith("settings: 4 errors")
    assert "did you mean 'prompts.jsonl'?" in text
    assert "trainer.lrr: unknown key; did you mean `lr`?" in text
    assert "reward: missing" in text
    assert "run.num_steps: missing" in text
    assert calls == []


@pytest.mark.parametrize("wrong", ["exactly", 3])
def test_what_is_no_reward(project: Path, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="reward: found"):
        paceline.train("org/model", ["a"], wrong, num_steps=1)


def test_a_running_event_loop_is_left_alone(project: Path, calls: Calls) -> None:
    threads: list[str] = []

    def call() -> int:
        threads.append(threading.current_thread().name)
        return asyncio.run(asyncio.sleep(0, 7))

    async def notebook() -> RunResult:
        assert _in_thread(call) == 7
        return paceline.train("org/model", ["a"], reward, num_steps=1)

    assert asyncio.run(notebook()).step == 1
    assert threads == ["paceline"]


def test_an_error_in_the_thread_is_raised_in_the_notebook() -> None:
    def call() -> None:
        raise ConfigError("wrong")

    with pytest.raises(ConfigError, match="wrong"):
        _in_thread(call)


def test_ctrl_c_reaches_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    started = threading.Event()

    def call() -> None:
        async def forever() -> None:
            started.set()
            try:
                while not ended:  # noqa: ASYNC110 - a loop that is busy, as a run's is
                    await asyncio.sleep(0.001)
            finally:
                ended.append("disposed")

        asyncio.run(forever())

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        monkeypatch.undo()
        assert started.wait(10)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _in_thread(call)
    assert ended == ["disposed"]


def test_names_of_the_package() -> None:
    assert paceline.__version__
    assert {"train", "sft", "evaluate", "generate"} <= set(dir(paceline))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = paceline.trian
