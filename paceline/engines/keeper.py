"""Runs a command and sees to it that nothing of it is left: `python -I -S keeper.py FD COMMAND`.

It is a program of its own, of the standard library alone. FD is the reading end of a pipe that its
parent holds open. When the pipe closes, or the parent is gone in whichever way, the command and all
that it has started are ended: asked by SIGTERM, and killed after a grace. The keeper ends as the
command did.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL."""
TRACKER_S = 1.0
"""Seconds that a tracker of resources may take to clean up."""
LOOK_S = 0.5
"""How often the parent and the command are looked at."""
OWN_MEMORY = ("sglang_",)
"""What names of it begin with; what others made and the command only uses has other names."""
SET_DEATH_SIGNAL, SET_SUBREAPER = 1, 36
"""Of prctl(2)."""


def main() -> int:
    pipe, command = int(sys.argv[1]), sys.argv[2:]
    parent = os.getppid()
    asked_to_end = False

    def ask(*_: object) -> None:
        nonlocal asked_to_end
        asked_to_end = True

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(SET_SUBREAPER, 1)
    try:
        child = subprocess.Popen(command, start_new_session=True, preexec_fn=_before_command)
    except OSError as error:
        print(f"{command[0]!r} can not be started: {error}", file=sys.stderr, flush=True)
        return 127
    watched = [pipe, *_process_handle(child.pid)]
    try:
        while child.poll() is None and not asked_to_end and os.getppid() == parent:
            readable, _, _ = select.select(watched, [], [], LOOK_S)
            if pipe in readable and not os.read(pipe, 1):
                break
    finally:
        _end(child)
    code = child.returncode
    return code if code >= 0 else 128 - code


def _process_handle(pid: int) -> list[int]:
    """Can be read when the process has ended; without it, that is seen at the next look."""
    try:
        return [os.pidfd_open(pid)]
    except (OSError, AttributeError):
        return []


def _before_command() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _prctl(SET_DEATH_SIGNAL, signal.SIGKILL)


def _end(child: subprocess.Popen[bytes]) -> None:
    left_behind = _shared_memory()
    try:
        _end_processes(child)
    finally:
        for path in left_behind:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _end_processes(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=GRACE_S)
    for pid in _descendants():
        if not _is_tracker(pid):
            _kill(pid)
    child.wait(timeout=GRACE_S)
    # Orphans come to the keeper as their subreaper, also those with a process group of their own.
    start = time.monotonic()
    while (left := _children()) and time.monotonic() < start + GRACE_S:
        for pid in left:
            if time.monotonic() > start + TRACKER_S or not _is_tracker(pid):
                _kill(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # ends: at once
        time.sleep(0.01)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _is_tracker(pid: int) -> bool:
    """One that Python starts beside a program, to take its semaphores away when it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"resource_tracker" in file.read()
    except OSError:
        return False


def _shared_memory() -> set[str]:
    """Shared memory that the command made for itself, and would take away if it were not killed."""
    found: set[str] = set()
    for pid in _descendants():
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps,
        ):
            paths = {line.rstrip().partition("/dev/shm/")[2] for line in maps}
            found |= {f"/dev/shm/{path}" for path in paths if path.startswith(OWN_MEMORY)}
    return found


def _descendants() -> list[int]:
    found, new = [], _children()
    while new:
        found += new
        new = [grandchild for pid in new for grandchild in _children(pid)]
    return found


def _children(parent: int | None = None) -> list[int]:
    """Processes whose parent is this one, or the given one."""
    own, found = parent or os.getpid(), []
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    for name in names:
        if name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                    fields = file.read().rpartition(")")[2].split()
                if int(fields[1]) == own:
                    found.append(int(name))
    return found


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
