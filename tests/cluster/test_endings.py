"""However a driver ends, nothing of what it started is left, and the next run starts at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from reward_workers import has_ended

import paceline

TESTS = Path(__file__).parent.parent
RUNTIMES = ["local", pytest.param("ray", marks=pytest.mark.slow)]
GONE_S = 15.0


@contextmanager
def driver(
    runtime: str, folder: Path, call: str
) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A driver that has started everything, and the processes that it knows of."""
    if runtime == "ray":
        pytest.importorskip("ray", reason="the extra `ray` is not installed")
    folder.mkdir()
    paths = [str(TESTS), str(Path(paceline.__file__).parent.parent)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "MARK_OF_TEST": str(folder)}
    command = [sys.executable, str(TESTS / "cluster_driver.py"), runtime, str(folder), call]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command, env=env, stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 60
        while not (folder / "started").exists():
            ended = process.poll() is not None
            assert not ended, (folder / "output").read_text()
            assert time.monotonic() < deadline, (folder / "output").read_text()
            time.sleep(0.05)
        yield process, json.loads((folder / "started").read_text())["pids"]
    finally:
        process.kill()
        process.wait(timeout=20)


def left(folder: Path, session: int) -> list[str]:
    """Living processes of the driver's session, or with its environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            environment = (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue
        is_own = f"MARK_OF_TEST={folder}".encode() in environment.split(b"\0")
        if stat[0] != "Z" and (is_own or int(stat[3]) == session):
            found.append(f"{entry.name}: {command}")
    return found


def wait_until_nothing_is_left(folder: Path, session: int, *, since: float) -> None:
    deadline = since + GONE_S
    while (found := left(folder, session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert found == []


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_nothing_is_left_of_a_killed_driver_and_the_next_run_starts_at_once(
    runtime: str, tmp_path: Path
) -> None:
    with driver(runtime, tmp_path / "first", "hang") as (first, pids):
        assert len(pids) == 9
        assert len(left(tmp_path / "first", first.pid)) >= 9
        first.kill()
        first.wait(timeout=20)
        killed = time.monotonic()
        with driver(runtime, tmp_path / "second", "idle") as (second, others):
            assert len(others) == 9
            wait_until_nothing_is_left(tmp_path / "first", first.pid, since=killed)
            assert all(has_ended(pid) for pid in pids)
    wait_until_nothing_is_left(tmp_path / "second", second.pid, since=time.monotonic())


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_ctrl_c_reaches_the_driver_alone_and_it_closes_everything(
    runtime: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with driver(runtime, folder, "idle") as (process, pids):
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=30) == -signal.SIGINT
        wait_until_nothing_is_left(folder, process.pid, since=time.monotonic())
        assert all(has_ended(pid) for pid in pids)
    # The objects were asked to close: no worker was hit by the signal.
    assert {path.name for path in folder.glob("closed-*")} == {"closed-0", "closed-1"}
    logs = [path.read_text() for path in (folder / "logs").glob("trainer*.log")]
    assert len(logs) == 4
    assert not any("KeyboardInterrupt" in log for log in logs)
    # Nor does Ray take a worker that was closed for one that crashed.
    assert "died" not in (folder / "output").read_text()
