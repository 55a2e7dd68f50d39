from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import rewrite_row, rewrite_samples, train_run

from paceline.cli import main
from paceline.cli.numbers import choose_sample
from paceline.errors import ConfigError, DataError
from paceline.observe.samples import SampleRecord, SampleWriter
from paceline.types import Episode, Group, Prompt, Sample, Status


def run(*words: str | Path) -> int:
    """The exit code of a command."""
    try:
        return main([str(word) for word in words])
    except SystemExit as end:
        return int(end.code or 0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    train_run(folder)
    return folder


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "project")
    return tmp_path / "project" / "runs" / "demo"


def test_replay_of_an_honest_step(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("replay", run_dir, "--step", "2") == 0
    out = capsys.readouterr().out
    assert "done again from the checkpoint of step 1" in out
    assert "train/grad_norm" in out
    assert "all agree (within 0.0001 of the larger number, or 1e-06; rewards within 1e-06)" in out


def test_replay_names_every_difference(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(items: list[dict[str, Any]]) -> None:
        items[1]["reward"] = 1.0 - items[1]["reward"]
        items[6]["logprobs"][0] -= 0.1

    rewrite_samples(run_dir, 2, change)
    rewrite_row(run_dir, 2, train__grad_norm=7.5)
    assert run("replay", run_dir, "--step", "2") == 1
    out = capsys.readouterr().out
    for text in ("reward of prompt 'add-", "log-prob of prompt 'add-", "advantage of prompt 'add-"):
        assert f"\n  {text}" in out
    assert "\n  train/grad_norm: recorded 7.5, replayed " in out
    assert run("replay", run_dir, "--step", "2", "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["agrees"] is False
    assert document["step"] == 2
    parts = {difference["part"] for difference in document["differences"]}
    assert parts == {"reward", "log-prob", "advantage", "metric"}
    assert document["metrics"]["train/grad_norm"][0] == 7.5


def test_what_can_not_be_replayed_exits_with_2(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run_dir / "checkpoints" / "step-000002")
    assert run("replay", run_dir) == 2
    assert "checkpoint.every=1" in capsys.readouterr().err

    def lose(items: list[dict[str, Any]]) -> None:
        items[0]["reward"] = None

    rewrite_samples(run_dir, 1, lose)
    assert run("replay", run_dir, "--step", "1") == 2
    assert "step 1 can not be replayed: prompt" in capsys.readouterr().err
    assert run("replay", run_dir / "none") == 2


def test_numbers_of_a_sample(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", run_dir, "--step", "2", "--numbers", "--sample", "best") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 2, prompt add-")
    head = "pos id text mask version behaviour old new ratio clipped advantage weight loss"
    assert lines[2].split() == head.split()
    sums = {line.partition("  ")[0]: line for line in lines[lines.index("", 3) + 1 :]}
    assert set(sums) == {"reward", "group", "advantage", "weight", "loss", "step's loss"}
    assert "= (1 - 0." in sums["advantage"]
    assert "trained tokens of the optimizer step" in sums["weight"]
    assert "tokens of -weight x advantage" in sums["loss"]
    assert "as recorded" in sums["step's loss"]
    trained = [line for line in lines[3 : lines.index("", 3)] if " 1 " in line and "no" in line]
    assert trained


def test_numbers_without_checkpoints(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    assert run("inspect", run_dir, "trainer.device=cpu", "--step", "2", "--numbers") == 0
    out = capsys.readouterr().out
    assert " old " not in out.splitlines()[2]
    assert " weight" in out.splitlines()[2]
    assert "note: old log-probs, ratios and losses are left out: step 2 began with" in out


def test_options_that_do_not_go_together(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", run_dir, "--sample", "best") == 2
    assert run("inspect", run_dir, "trainer.device=cpu") == 2
    assert run("inspect", run_dir, "--numbers", "--prompt", "add-1") == 2
    assert run("inspect", run_dir, "--numbers", "--sample", "add-99") == 2
    assert "no sample of the step has this name; did you mean 'add-" in capsys.readouterr().err


def test_answers_of_an_eval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = Sample(
        "policy", "p1", 0, [1, 2], [False, True], [0.0, -0.1], [-1, 3], Status.UNSCORED,
        text="forty", cause="reward/ValueError", detail="no number (rewards.py:3 in score)",
    )  # fmt: skip
    group = Group(Prompt("p1", text="ask"), [Episode("p1", 0, [sample])])
    (tmp_path / "samples").mkdir()
    assert run("inspect", tmp_path, "--eval", "held") == 2
    assert "there are none to any" in capsys.readouterr().err
    SampleWriter(tmp_path / "samples").of_eval("held").write(4, [group])
    assert run("inspect", tmp_path, "--eval", "held", "--first", "1") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "step 4: 1 samples" in out
    assert "forty" in out
    assert "no number" in out
    assert run("inspect", tmp_path, "--eval", "held", "--prompt", "p1") == 0
    assert run("inspect", tmp_path, "--eval", "hold") == 2
    assert "did you mean 'held'?" in capsys.readouterr().err


def record(prompt: str, episode: int, reward: float | None, **changes: Any) -> SampleRecord:
    fields: dict[str, Any] = {
        "prompt_id": prompt, "draw": 0, "episode": episode, "role": "policy", "policy": "policy",
        "status": "completed", "finish": "stop", "cause": None, "reward": reward, "parts": {},
        "advantage": 0.0, "versions": [0, 0], "num_tokens": 1, "text": "", "prompt": "",
        "tokens": [1, 2], "mask_runs": [1, 1], "logprobs": [0.0],
    }  # fmt: skip
    return SampleRecord(**(fields | changes))


def test_how_a_sample_is_named() -> None:
    records = [
        record("b/1", 0, None, num_tokens=0),
        record("b/1", 1, 0.5),
        record("a", 0, 0.9),
        record("a", 1, 0.1),
        record("a", 1, 0.1, row=1),
        record("7", 0, 2.0, dropped="surplus"),
    ]
    names = {
        None: 1, "best": 2, "worst": 3, "a": 2, "a/0": 2, "b/1": 1, "b/1/0": 0, "a/1/1": 4,
        "7": 5, "0": 0, "4": 4,
    }  # fmt: skip
    for name, index in names.items():
        assert choose_sample(records, name) == index, name
    with pytest.raises(ConfigError, match="has 6 samples"):
        choose_sample(records, "9")
    with pytest.raises(DataError, match="did you mean 'b/1'"):
        choose_sample(records, "b/l")
    with pytest.raises(DataError, match="no sample of the step was trained on"):
        choose_sample(records[:1], None)
