"""Ends a Ray cluster with the process that started it: `python -I -S ray_guard.py MARK`.

A program of its own, of the standard library alone. Standard input is a pipe that its parent holds
open, and tells the cluster's session folder. When it closes, or the parent is gone in whichever
way, every process is killed that was started with MARK in its environment, or that has files of
the session open (some write over their environment): Ray's own agents outlive the rest by minutes
otherwise.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator

PATIENCE_S = 10.0
"""For processes that are being started, or can not die yet."""
LOOK_S = 0.2
RAY_PROGRAM = re.compile(rb"^ray::|/ray/")


def main() -> None:
    mark = sys.argv[1].encode()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    session = b""
    while told := os.read(0, 4096):
        session += told
    deadline = time.monotonic() + PATIENCE_S
    while (found := belonging(mark, session)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)


def belonging(mark: bytes, session: bytes) -> list[int]:
    """Living processes of the cluster, without this one."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and _belongs(pid, mark, session)]


def _belongs(pid: int, mark: bytes, session: bytes) -> bool:
    # A process may end while it is looked at, and others are none of ours.
    with contextlib.suppress(OSError):
        if mark in _read(f"/proc/{pid}/environ").split(b"\0"):
            return True
        # The driver, and others that joined, have such files open, too.
        if session and RAY_PROGRAM.search(_read(f"/proc/{pid}/cmdline")):
            return any(path.startswith(session + b"/") for path in _open_files(pid))
    return False


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _open_files(pid: int) -> Iterator[bytes]:
    for entry in os.scandir(f"/proc/{pid}/fd".encode()):
        with contextlib.suppress(OSError):
            yield os.readlink(entry.path)


if __name__ == "__main__":
    main()
