"""`kill -9` at any moment of a run that samples ahead, again and again: over all its lives each
prompt is trained on exactly as often as configured. See exactly_once_runs.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "exactly_once_runs.py"
NUM_PROMPTS, NUM_EPOCHS = 10, 4


def lives(folder: Path, *options: str) -> list[dict[str, Any]]:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder / "work"), *options],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def check(found: list[dict[str, Any]], *, drops: bool) -> None:
    for run in found:
        assert run["violations"] == [], run
        assert set(run["statuses"][:-1]) <= {-9}, run
        assert run["statuses"][-1] == 0, run
        prompts = run["end"]["prompts"]
        assert len(prompts) == NUM_PROMPTS, run
        for name, (committed, dropped, trained) in prompts.items():
            assert committed == trained, f"{name} of {run}"
            assert committed + dropped == NUM_EPOCHS, f"{name} of {run}"
            assert drops or not dropped, f"{name} of {run}"


@pytest.mark.timeout(300)
def test_each_prompt_is_trained_as_often_as_configured(tmp_path: Path) -> None:
    found = lives(tmp_path, "4", "3")
    check(found, drops=False)
    assert sum(len(run["statuses"]) - 1 for run in found) >= 3, "there were few kills"
    assert any(step > 0 for run in found for step in run["resumed_at"])


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("drops", [False, True])
def test_over_many_lives(tmp_path: Path, drops: bool) -> None:
    found = lives(tmp_path, "9", *map(str, range(10, 18)), *(["--drops"] if drops else []))
    assert len(found) == 8
    check(found, drops=drops)
    assert {run["pause"] for run in found} == {"finish", "keep", "recompute", "abort"}
