"""A worker process of this machine: `python -P -m paceline.cluster.worker_main PARENT`.

Its parent is `local.LocalGroup`. Standard output is the socket to it; prints go to standard error,
which is the log. It ends with its parent: by the kernel on Linux, and by its guard everywhere.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

from paceline.cluster import wire
from paceline.cluster.worker import Worker, prepare_process, quit_process

PR_SET_PDEATHSIG = 1


def main() -> None:
    _die_with_parent(int(sys.argv[1]))
    pipe = socket.socket(fileno=os.dup(1))
    os.dup2(2, 1)
    worker = Worker()
    last = wire.Packed([])
    try:
        _, message = wire.read(pipe)
        prepare_process(wire.decode(message))
        while not worker.is_closed:
            number, message = wire.read(pipe)
            # The driver asks again when it has the last answer: its memory may go now.
            last.close()
            last = wire.Packed(worker.answer(message))
            del message  # what came is not kept until the next call
            wire.write(pipe, number, last)
    except (EOFError, OSError):
        quit_process(1)
    quit_process(0)


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
