from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paceline.checkpoint.lock import FolderLock
from paceline.errors import CheckpointError

OTHER_PROCESS = """
import sys
from pathlib import Path
from paceline.checkpoint.lock import FolderLock
from paceline.errors import CheckpointError
try:
    FolderLock(Path(sys.argv[1])).acquire()
except CheckpointError as error:
    print(error)
"""


def try_elsewhere(path: Path) -> str:
    """What another process is told; empty if it got the lock."""
    command = [sys.executable, "-c", OTHER_PROCESS, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_two_runs_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path / ".lock"), FolderLock(tmp_path / "x" / ".." / ".lock")
    (tmp_path / "x").mkdir()
    first.acquire()
    first.acquire()
    with pytest.raises(CheckpointError, match="another run of this process writes to the run"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


def test_the_one_that_was_refused_drops_nobodys_lock(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    first, second = FolderLock(path), FolderLock(path)
    first.acquire()
    with pytest.raises(CheckpointError):
        second.acquire()
    second.release()
    with pytest.raises(CheckpointError):
        FolderLock(path).acquire()
    assert "another process writes to the run" in try_elsewhere(path)
    first.release()
    assert try_elsewhere(path) == ""


def test_of_many_threads_one_gets_it(tmp_path: Path) -> None:
    start, got = threading.Barrier(8), []

    def enter() -> None:
        lock = FolderLock(tmp_path / ".lock")
        start.wait(20)
        try:
            lock.acquire()
        except CheckpointError:
            return
        got.append(lock)

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(got) == 1
    got[0].release()


def test_a_folder_that_is_not_there_leaves_nothing_held(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "folder" / ".lock")
    with pytest.raises(FileNotFoundError):
        lock.acquire()
    (tmp_path / "folder").mkdir()
    lock.acquire()
    lock.release()
