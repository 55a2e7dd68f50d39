"""A segment of shared memory that torch in another process maps without a copy.

torch's own sharing by file name starts a helper process that holds on to this one's output, counts
readers in a way that fits one reader a message, and removes a dead sender's memory only when all
its readers have ended. So the file is made here; only what readers talk to is torch's:

- the header before the numbers, with a count of readers that never gets to zero;
- `torch_shm_manager`, with which each reader says that it maps the file. It is started without
  this process's output, lives as long as anybody is connected to it, and then ends by itself. A
  reader whose manager has gone would be ended by torch.

The file goes with `close`; should this process be killed before, a shell that waits for that
removes it.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import secrets
import socket
import subprocess
import threading
import weakref
from pathlib import Path

import torch

from paceline.errors import WeightError

ROOT = Path("/dev/shm")
PREFIX = "paceline-"
HEADER = 64
"""Bytes before the numbers: torch's alignment of mapped memory."""
NEVER_LAST = 1 << 30
"""Readers count down from here; the one that got to zero would remove the file."""
START_S = 30.0


class Segment:
    """Flat bytes that other processes of this machine can map."""

    def __init__(self, size: int) -> None:
        """size: of which memory is taken as far as `reserve` is called for."""
        self.manager = _manager.path()
        self.name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
        self.size = size
        path = ROOT / self.name
        self._remover = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; rm -f -- "$1"', "sh", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._close = weakref.finalize(self, _remove, path, self._handle, self._remover)
        self._reserved = 0
        os.truncate(self._handle, HEADER + size)
        self.reserve(0)
        memory = mmap.mmap(self._handle, HEADER + size)
        memory[:4] = NEVER_LAST.to_bytes(4, "little")
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER, count=size)

    def reserve(self, end: int) -> None:
        """Before bytes up to `end` are written: a first write into a full disk ends the process.

        Raises WeightError if there is not so much shared memory.
        """
        missing = HEADER + end - self._reserved
        if missing <= 0:
            return
        try:
            os.posix_fallocate(self._handle, self._reserved, missing)
        except OSError as error:
            self.close()
            raise WeightError(
                f"{(HEADER + end) / 2**20:.0f} MiB of shared memory can not be had in {ROOT}: "
                f"{error}; lower engine.bucket_mb, or give the machine more (of a container: "
                "--shm-size)"
            ) from error
        self._reserved += missing

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """True if these are the segment's own bytes."""
        return storage.data_ptr() == self.tensor.untyped_storage().data_ptr()

    def close(self) -> None:
        """Remove the file; who has mapped it keeps its bytes. Idempotent."""
        self._close()


def _remove(path: Path, handle: int, remover: subprocess.Popen[bytes]) -> None:
    os.close(handle)
    path.unlink(missing_ok=True)
    assert remover.stdin is not None
    with contextlib.suppress(OSError):
        remover.stdin.close()
    try:
        remover.wait(timeout=START_S)
    except subprocess.TimeoutExpired:
        remover.kill()


class _Manager:
    """One `torch_shm_manager` for all segments of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._path = ""
        self._connection: socket.socket | None = None
        """While it is open, the manager runs."""

    def path(self) -> str:
        """Of its socket; it runs as long as this process does, and its readers."""
        with self._lock:  # ends: when the manager has started or failed, within START_S
            if self._pid != os.getpid() or not self._runs():
                self.close()
                self._start()
            return self._path

    def close(self) -> None:
        """Leave it to its readers. Idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _runs(self) -> bool:
        if self._connection is None:
            return False
        try:
            return bool(self._connection.recv(1, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _start(self) -> None:
        program = Path(torch.__file__).parent / "bin" / "torch_shm_manager"
        if not os.access(program, os.X_OK):
            raise WeightError(
                f"weights can not be shared with another process: torch's {program} is missing; "
                'set engine.weights = "collective"'
            )
        # The shell ends at once, so that the manager outlives this process if readers need it.
        shell = subprocess.Popen(
            ["/bin/sh", "-c", '"$1" &', "sh", str(program)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        assert shell.stdout is not None
        with shell.stdout:
            self._path = shell.stdout.readline().decode().strip()
        shell.wait(timeout=START_S)
        if not self._path or self._path.startswith("ERROR"):
            raise WeightError(f"{program} failed: {self._path or 'it ended without a word'}")
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(START_S)
        self._connection.connect(self._path)
        self._connection.setblocking(False)  # else `_runs` would wait for a word, up to START_S
        self._pid = os.getpid()


_manager = _Manager()
atexit.register(_manager.close)
