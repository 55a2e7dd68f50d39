"""Commands over models and runs: targets, export, eval, generate, inspect, reward-test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_runs import EVALS, make_checkpoint, run
from run_files import VALID, write_project

from paceline import build
from paceline.build import EvalReport
from paceline.cli.targets import find_target
from paceline.config import RunFile
from paceline.errors import (
    CheckpointError,
    ConfigError,
)
from paceline.observe.samples import SampleWriter
from paceline.types import Episode, Group, Prompt, Sample, Status


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


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunFile, Path | None]]:
    calls: list[tuple[RunFile, Path | None]] = []

    def evaluate(run_file: RunFile, *, weights: Path | None, checkpoint: Any) -> EvalReport:
        assert (checkpoint is None) == (weights is None)
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
