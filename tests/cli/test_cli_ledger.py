from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_runs import run
from recorded_runs import train_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps that sample ahead, of which the first three were saved."""
    folder = tmp_path_factory.mktemp("project")
    train_run(
        folder, "schedule.max_staleness=2", "algorithm.correction.high=2.0", "checkpoint.every=3",
        "run.num_steps=9", "run.debug_exit_after=4",
    )  # fmt: skip
    return folder


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained / "runs" / "demo", tmp_path / "demo")
    return tmp_path / "demo"


def test_every_prompt_is_told(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", run_dir, "--ledger") == 0
    out = capsys.readouterr().out
    assert "as of the checkpoint of step 3" in out
    assert "trained on  12 draws" in out
    assert "committed   9, in steps up to 3" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("prompts/add-")]
    assert [row[0] for row in rows] == [f"prompts/add-{i}" for i in range(9)]
    assert sum(int(row[2]) for row in rows) == 12
    assert sum(int(row[3]) for row in rows) == 9
    assert all(len(row[7:]) == int(row[2]) for row in rows)
    assert "every draw was trained on once" in out


def test_what_was_trained_twice_or_lost_ends_with_an_error(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_dir / "ledger.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    twice, gone = lines[0]["trained"][0], lines[1]["trained"][0]
    lines[1]["trained"][0] = twice
    lines[1]["prompts"][str(twice)] = lines[0]["prompts"][str(twice)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run("inspect", run_dir, "--ledger") == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "does not come out even" in err
    assert f"draw {twice} " in err
    assert "was trained on in steps [1, 2], not once" in err
    assert f"draws {gone}: drawn, and neither trained on, dropped, sampled nor given back" in err


def test_a_policy_or_a_ledger_that_is_not_there_is_told(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("inspect", run_dir, "--ledger", "--policy", "polcy") == 2
    assert "did you mean" in capsys.readouterr().err
    shutil.rmtree(run_dir / "checkpoints")
    assert run("inspect", run_dir, "--ledger") == 0
    assert "trained on  12 draws" in capsys.readouterr().out
    (run_dir / "ledger.jsonl").unlink()
    assert run("inspect", run_dir, "--ledger") == 2
    assert "ledger.jsonl" in capsys.readouterr().err
