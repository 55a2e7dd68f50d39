from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_files import VALID, write_project

from paceline import build
from paceline.build import EvalReport, RunResult
from paceline.build.loop import Terminated
from paceline.checkpoint import CheckpointStore, PolicyProgress, RunState
from paceline.checkpoint_settings import CheckpointConfig
from paceline.cli import main
from paceline.cli.app import COMMANDS
from paceline.cli.options import complete_key, complete_override
from paceline.cli.targets import find_target
from paceline.config import RunFile, load_run_file
from paceline.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    MissingExtraError,
    PacelineError,
)
from paceline.observe.samples import SampleWriter
from paceline.types import Episode, Group, Prompt, Sample, Status


def run(*words: str | Path) -> int:
    """The exit code of a command."""
    try:
        return main([str(word) for word in words])
    except SystemExit as end:
        return int(end.code or 0)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[RunFile]:
    """Replaces training; holds what it was called with."""
    calls: list[RunFile] = []

    def train(run_file: RunFile, **options: Any) -> RunResult:
        calls.append(run_file)
        evals = {"eval/held/reward": 0.75, "eval/held/prompts": 8.0}
        first = {"eval/held/reward": 0.25}
        return RunResult(run_file.run_dir, 3, 3, first, evals, Path("m/model"))

    monkeypatch.setattr(build, "train", train)
    return calls


def make_checkpoint(run_dir: Path, step: int, score: float | None = None) -> Path:
    """A committed checkpoint with a small model folder; returns its folder."""
    config = CheckpointConfig.model_construct(
        **{**CheckpointConfig().model_dump(), "best_metric": "train/loss", "keep_last": 9}
    )
    store = CheckpointStore(run_dir / "checkpoints", config)
    store.prepare()
    with store.staging(step) as staged:
        model = staged.policy_folder("policy") / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        (model / "weights").write_text(f"of step {step}")
        progress = {"policy": PolicyProgress(step, step)}
        staged.write_state(
            RunState(
                step=step, leader="policy", policies=progress, seed=0, fingerprint={}, metrics={}
            )
        )
        folder = store.commit(staged).folder
    if score is not None:
        store.record(step, {"train/loss": score})
    store.close()
    return folder


def test_check_of_a_right_file_says_what_it_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", write_project(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "is right" in out
    assert "demo: 3 steps" in out
    assert "grpo: 16 prompts x 8 answers a step, 1 update with lr 1e-06" in out


def test_check_prints_all_errors_once_and_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_project(tmp_path, VALID + "[trainer]\nlrr = 1\neps = 'x'\n")
    assert run("check", path, "run.seed=-1") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {path}: 3 errors\n")
    assert "Traceback" not in captured.err
    assert captured.err.count("trainer.lrr") == 1


def test_check_prints_the_resolved_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", write_project(tmp_path), "trainer.lr=0.5", "--resolved") == 0
    assert "lr = 0.5" in capsys.readouterr().out


def test_check_says_that_a_run_would_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_project(tmp_path)
    make_checkpoint(tmp_path / "runs" / "demo", 2)
    assert run("check", path) == 0
    assert "has checkpoints to go on from" in capsys.readouterr().out


HEAVY = ["torch", "transformers", "numpy", "pyarrow", "datasets", "rich.live"]


def test_check_imports_nothing_heavy_and_takes_less_than_a_second(tmp_path: Path) -> None:
    path = write_project(tmp_path)
    code = (
        "import sys; from paceline.cli import main\n"
        f"code = 0\ntry: code = main(['check', {str(path)!r}])\n"
        "except SystemExit as end: code = end.code\n"
        f"print(code, [name for name in {HEAVY} if name in sys.modules])"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr
    # CPU time, since wall time is also that of whatever else runs on the machine.
    spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent_s < 1.0


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, paceline, paceline.config; assert 'train' in dir(paceline); "
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_train_hands_over_the_checked_file(
    tmp_path: Path, trained: list[RunFile], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", write_project(tmp_path), "run.num_steps=7", "trainer.lr=1e-3") == 0
    assert trained[0].run.num_steps == 7
    assert trained[0].trainer.lr == 1e-3
    assert trained[0].run.resume == "auto"
    out = capsys.readouterr().out
    assert "eval/held/reward  0.25   0.75" in out
    assert "eval/held/prompts" not in out
    assert "m/model" in out


@pytest.mark.parametrize(("option", "resume"), [("--resume", "must"), ("--no-resume", "never")])
def test_resume_options(tmp_path: Path, trained: list[RunFile], option: str, resume: str) -> None:
    assert run("train", write_project(tmp_path), option) == 0
    assert trained[0].run.resume == resume


def test_dry_run_prints_the_file_and_trains_nothing(
    tmp_path: Path, trained: list[RunFile], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", write_project(tmp_path), "--dry-run") == 0
    assert trained == []
    assert 'name = "demo"' in capsys.readouterr().out


def test_sft_is_train_with_another_algorithm(tmp_path: Path, trained: list[RunFile]) -> None:
    assert run("sft", write_project(tmp_path)) == 0
    assert getattr(trained[0].algorithm, "kind", None) == "sft"


def test_sft_refuses_a_file_of_another_algorithm(
    tmp_path: Path, trained: list[RunFile], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_project(tmp_path, VALID + '[algorithm]\nkind = "grpo"\n')
    assert run("sft", path) == 2
    assert "algorithm.kind is 'grpo'" in capsys.readouterr().err
    assert run("sft", path, "algorithm.kind=sft") == 0
    assert len(trained) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("c"), 2),
        (DataError("d"), 2),
        (EngineError("e"), 1),
        (MissingExtraError("x", "y", "z"), 1),
        (PacelineError("p"), 1),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("z"), 1),
    ],
)
def test_exit_codes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
) -> None:
    def train(run_file: RunFile) -> RunResult:
        raise error

    monkeypatch.setattr(build, "train", train)
    assert run("train", write_project(tmp_path)) == code
    text = capsys.readouterr().err
    is_expected = isinstance(error, PacelineError | KeyboardInterrupt)
    assert ("Traceback" in text) != is_expected
    assert ("please report it" in text) != is_expected


def test_debug_shows_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", tmp_path / "none.toml", "--debug") == 2
    assert "Traceback" in capsys.readouterr().err


def test_notes_of_an_error_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(run_file: RunFile) -> RunResult:
        error = EngineError("the engine fell over")
        error.add_note("while closing: disk full")
        raise error

    monkeypatch.setattr(build, "train", train)
    assert run("train", write_project(tmp_path)) == 1
    assert capsys.readouterr().err == "error: the engine fell over\nwhile closing: disk full\n"


@pytest.mark.parametrize("words", [["train"], ["nonsense"], ["check", "a.toml", "--nonsense"]])
def test_bad_usage_exits_with_2(words: list[str]) -> None:
    assert run(*words) == 2


@pytest.mark.parametrize("name", [name for name, _, _ in COMMANDS])
def test_every_command_has_help_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, "--help") == 0
    out = capsys.readouterr().out
    assert f"paceline {name}" in out.replace("Usage: paceline", "")
    assert "Example" in out


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert "paceline 0." in capsys.readouterr().out
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert "install-completion" in out
    assert all(name in out for name, _, _ in COMMANDS)


def test_completion_of_keys() -> None:
    assert complete_override("trainer.lr") == [
        "trainer.lr=",
        "trainer.lr_schedule=",
        "trainer.lr_warmup_steps=",
    ]
    assert "algorithm" in complete_key("al")


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "trainer.lr") == 0
    assert "Peak learning rate" in capsys.readouterr().out
    assert run("explain", "trainer.lrr") == 2
    assert "did you mean" in capsys.readouterr().err


def test_a_run_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 2)
    folder = make_checkpoint(tmp_path, 4)
    target = find_target(str(tmp_path))
    assert (target.step, target.run_dir) == (4, tmp_path)
    assert target.model == str(folder / "policies" / "policy" / "model")
    assert find_target(str(tmp_path), step=2).step == 2
    assert find_target(str(folder)) == target


def test_the_best_checkpoint(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 2, score=0.9)
    make_checkpoint(tmp_path, 4, score=0.1)
    assert find_target(str(tmp_path), best=True).step == 2


def test_without_scores_there_is_no_best(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"checkpoint\.best_metric"):
        find_target(str(tmp_path), best=True)


def test_models_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert find_target(str(tmp_path)).model == str(tmp_path)
    assert find_target("org/model").model == "org/model"


@pytest.mark.parametrize("name", ["./none", "/none/of/it", "run.toml", "empty"])
def test_what_is_no_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError):
        find_target(name)


def test_export_copies_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "run", 2)
    make_checkpoint(tmp_path / "run", 4)
    assert run("export", tmp_path / "run", tmp_path / "out", "--step", "2") == 0
    assert (tmp_path / "out" / "weights").read_text() == "of step 2"
    assert run("export", tmp_path / "run", tmp_path / "out") == 2
    assert "exists" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_export_refuses_a_damaged_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint(tmp_path / "run", 2)
    weights = folder / "policies" / "policy" / "model" / "weights"
    weights.write_text("of step 3")
    assert run("export", folder, tmp_path / "out") == 1
    assert "weights" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_export_says_what_is_not_there_or_can_not_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("export", "nope", "out") == 2
    assert "there is no folder nope" in capsys.readouterr().err
    make_checkpoint(tmp_path / "run", 2)
    assert run("export", "run", "no/where/out") == 2
    assert f"there is no folder {tmp_path}/no/where to put out into" in capsys.readouterr().err
    assert run("export", "run", "/proc/out") == 1
    assert "error: /proc/out can not be written: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\udcff", "prompt 2 of --prompt is not valid UTF-8 at character 2"),
        ("", "prompt 2 of --prompt is empty"),
    ],
)
def test_generate_refuses_what_no_tokenizer_takes(
    capsys: pytest.CaptureFixture[str], text: str, expected: str
) -> None:
    assert run("generate", "org/model", "-p", "good", "-p", text) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("code", [None, 0, 5])
def test_user_code_that_exits_is_no_success(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int | None,
) -> None:
    monkeypatch.setattr(build, "train", lambda run_file: sys.exit(code))
    assert run("train", write_project(tmp_path)) == 1
    err = capsys.readouterr().err
    assert f"{Path(__file__).name}:" in err
    assert f"ended the program by SystemExit({code})" in err


def test_sigterm_keeps_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(run_file: RunFile) -> RunResult:
        raise Terminated(143)

    monkeypatch.setattr(build, "train", train)
    assert run("train", write_project(tmp_path)) == 143


EVALS = '[[evals.sets]]\nname = "held"\ndata = { path = "prompts.jsonl" }\n'


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunFile, Path | None]]:
    calls: list[tuple[RunFile, Path | None]] = []

    def evaluate(run_file: RunFile, *, weights: Path | None) -> EvalReport:
        calls.append((run_file, weights))
        values = {
            "eval/held/reward": 0.5,
            "eval/held/reward/low": 0.4,
            "eval/held/reward/high": 0.6,
        }
        return EvalReport("w", values, {"other": "timeout"} if len(calls) > 1 else {})

    monkeypatch.setattr(build, "evaluate", evaluate)
    return calls


def test_eval_of_a_run_uses_its_own_file(
    tmp_path: Path,
    evaluated: list[tuple[RunFile, Path | None]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_project(tmp_path, VALID + EVALS)
    folder = make_checkpoint(tmp_path / "runs" / "demo", 2)
    text = path.read_text().replace("[run]", '[run]\nbase = "../.."')
    (tmp_path / "runs" / "demo" / "run.toml").write_text(text)
    assert run("eval", tmp_path / "runs" / "demo", "evals.sets.0.limit=5") == 0
    run_file, weights = evaluated[0]
    assert weights == folder / "policies" / "policy" / "model"
    assert run_file.evals.sets[0].limit == 5
    assert "eval/held/reward  0.5  95 %: 0.4 to 0.6" in capsys.readouterr().out
    assert run("eval", tmp_path / "runs" / "demo", "--json") == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["eval/held/reward"] == 0.5
    assert "'other' has no numbers: timeout" in captured.err


def test_eval_of_a_model_needs_a_run_file(
    tmp_path: Path,
    evaluated: list[tuple[RunFile, Path | None]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_project(tmp_path, VALID.replace("num_steps = 3\n", "") + EVALS)
    assert run("eval", "org/other") == 2
    assert "add --config run.toml" in capsys.readouterr().err
    assert run("eval", "org/other", "--config", path) == 0
    assert evaluated[0][0].model.path == "org/other"
    assert evaluated[0][1] is None


def test_generate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []

    def generate(model: Any, engine: Any, prompts: list[str], sampling: Any, *, seed: int) -> Any:
        asked.append((model.path, prompts, sampling.max_tokens, sampling.temperature, seed))
        return [prompt.upper() for prompt in prompts]

    monkeypatch.setattr(build, "generate", generate)
    assert run("generate", "org/model", "--prompt", "hello", "--max-tokens", "5") == 0
    assert capsys.readouterr().out == "HELLO\n"
    assert run("generate", "org/model", "-p", "a", "-p", "b", "--temperature", "0") == 0
    assert capsys.readouterr().out == "> a\nA\n\n> b\nB\n\n"
    assert asked[0] == ("org/model", ["hello"], 5, 1.0, 0)
    assert asked[1][3] == 0


def sample(reward: float, text: str) -> Sample:
    return Sample(
        "policy", "p1", 0, [1, 2], [False, True], [0.0, -0.1], [-1, 3], Status.COMPLETED,
        reward=reward, text=text,
    )  # fmt: skip


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = [sample(0.0, "wrong"), sample(1.0, "right")]
    group = Group(Prompt("p1", text="ask"), [Episode("p1", i, [s]) for i, s in enumerate(samples)])
    SampleWriter(tmp_path / "samples").write(3, [group])
    assert run("inspect", tmp_path, "--best", "1", "--worst", "0") == 0
    out = capsys.readouterr().out
    assert "right" in out
    assert "wrong" not in out
    assert run("inspect", tmp_path, "--prompt", "p1") == 0
    assert "wrong" in capsys.readouterr().out
    assert run("inspect", tmp_path, "--prompt", "p2") == 2
    assert run("inspect", tmp_path, "--step", "9") == 2
    assert "nearest step is 3" in capsys.readouterr().err
    assert run("inspect", tmp_path / "none") == 2


def test_reward_test_scores_given_completions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_project(tmp_path)
    completions = tmp_path / "completions.jsonl"
    completions.write_text(
        '{"completion": "2", "answer": "2"}\n\n{"completion": "3", "answer": "2"}\n'
    )
    assert run("reward-test", path, completions) == 0
    out = capsys.readouterr().out
    assert "2 completions, 0 not scored, mean 0.5" in out


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no lines"),
        ('{"completion": "2"}\n{', ":2: not valid JSON"),
        ('{"text": "2"}', ":1: needs an object with the text column 'completion'"),
        ("[1]", ":1: needs an object with the text column 'completion'"),
    ],
)
def test_reward_test_names_bad_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    completions = tmp_path / "completions.jsonl"
    completions.write_text(text)
    assert run("reward-test", write_project(tmp_path), completions) == 2
    assert reason in capsys.readouterr().err


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("paceline ")


def test_the_resolved_file_of_a_summary_loads(tmp_path: Path) -> None:
    assert load_run_file(write_project(tmp_path)).run.name == "demo"
