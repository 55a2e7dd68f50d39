"""`kill -9` at every phase and inside every write: a resumed run ends as if nothing had happened.

The run crosses epoch boundaries (6 prompts, 4 a step, 3 epochs), saves every second step, keeps
the best checkpoint and evaluates; with PPO a critic learns alone for two steps, then with the
policy. With several policies they learn from joint episodes, one of three from its own, in the
deterministic mode. Checkpoints are written in the background, while the run goes on, or not, by
`checkpoint.background`: that changes no bit. Compared are weights, moments, metrics, every sample,
the data cursor, buffers and the best score, bit for bit; see crash_runs.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "crash_runs.py"


def crash(folder: Path, *options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder / "runs"), *options],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return lines[0], lines[1:]


def check(lines: list[dict[str, Any]], num_kills: int) -> None:
    assert lines
    for line in lines:
        assert line["statuses"][:num_kills].count(-9) >= 1, f"was not killed: {line}"
        assert line["statuses"][-1] == 0, f"did not end: {line}"
        assert line["different"] == [], f"ended differently: {line}"


ALGORITHMS = pytest.mark.parametrize("options", [(), ("--ppo",)], ids=["grpo", "ppo"])


@pytest.mark.timeout(300)
@ALGORITHMS
def test_killed_at_some_events(tmp_path: Path, options: tuple[str, ...]) -> None:
    first, lines = crash(tmp_path, "3", "9999", "37", *options)
    assert first["steps"] == 6  # before training, and 6 prompts * 3 epochs / 4 a step
    models = [name for name in first["expected"]["hashes"] if name.endswith("model.safetensors")]
    assert len(models) == (2 if options else 1)
    check(lines, 1)


@pytest.mark.timeout(300)
def test_killed_at_some_events_while_a_slow_disk_writes(tmp_path: Path) -> None:
    """The next steps are sampled, learned from and written down before a checkpoint is there."""
    first, lines = crash(tmp_path / "slow", "11", "9999", "61", "--slow-disk", "--apart")
    check(lines, 1)
    stopped, lines = crash(tmp_path / "stopped", "5", "9999", "131", "--foreground", "--apart")
    check(lines, 1)
    assert stopped["expected"] == first["expected"]


@pytest.mark.timeout(300)
def test_killed_at_some_events_with_a_teacher(tmp_path: Path) -> None:
    """A teacher leaves nothing in a checkpoint: few kills show that it is back."""
    first, lines = crash(tmp_path, "7", "9999", "83", "--distill")
    assert first["expected"]["rows"][1]["train/kl_teacher"] > 0
    check(lines, 1)


@pytest.mark.timeout(300)
def test_killed_at_some_events_with_an_adapter(tmp_path: Path) -> None:
    first, lines = crash(tmp_path, "5", "9999", "97", "--lora")
    assert first["expected"]["rows"][1]["train/adapter_norm"] > 0
    assert any(name.endswith("adapter_model.safetensors") for name in first["expected"]["hashes"])
    check(lines, 1)


@pytest.mark.timeout(300)
def test_killed_at_some_events_with_two_policies(tmp_path: Path) -> None:
    first, lines = crash(tmp_path, "61", "9999", "131", "--two")
    newest = {row["policy"]: row["step"] for row in first["expected"]["rows"]}
    assert newest == {"solver": 5, "verifier": 5}
    assert {name.split("/")[1] for name in first["expected"]["hashes"]} == {"solver", "verifier"}
    assert first["expected"]["data"]["feeds"]["shared"]["buffers"].keys() == newest.keys()
    check(lines, 1)


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(("option", "stride"), [("--two", "23"), ("--three", "47")])
def test_killed_at_many_events_with_several_policies(
    tmp_path: Path, option: str, stride: str
) -> None:
    first, lines = crash(tmp_path, "3", "9999", stride, option)
    policies = {row["policy"] for row in first["expected"]["rows"]}
    assert len(policies) == (2 if option == "--two" else 3)
    assert len(lines) > 7
    check(lines, 1)


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_killed_at_every_second_event(tmp_path: Path) -> None:
    first, lines = crash(tmp_path, "1", "9999", "2")
    assert len(lines) == len(range(1, first["events"] + 1, 2)) > 50
    check(lines, 1)


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_killed_at_every_sixth_event_with_a_critic(tmp_path: Path) -> None:
    """A save has the same operations as without one, only more of them."""
    first, lines = crash(tmp_path, "1", "9999", "6", "--ppo")
    assert len(lines) == len(range(1, first["events"] + 1, 6)) > 20
    check(lines, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@ALGORITHMS
def test_killed_twice(tmp_path: Path, options: tuple[str, ...]) -> None:
    _, lines = crash(tmp_path, "2", "9999", "17", "--second", *options)
    check(lines, 2)


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("options", [("--slow-disk", "--apart"), ("--foreground",)])
def test_killed_at_many_events_of_either_way_to_save(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    _, lines = crash(tmp_path, "1", "9999", "9", *options)
    assert len(lines) > 10
    check(lines, 1)
