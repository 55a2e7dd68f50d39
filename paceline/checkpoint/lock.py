"""One writer per run: a lock that the system drops when its process dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import threading
from pathlib import Path

from paceline.errors import CheckpointError

logger = logging.getLogger(__name__)

_guard = threading.Lock()
_held: set[Path] = set()
"""What this process holds. The system's lock does not keep two of its own runs apart, and closing
any handle of the file would drop it: so no second one is ever opened."""


class FolderLock:
    """A POSIX record lock on a file: child processes do not inherit it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key: Path | None = None
        self._handle: int | None = None

    def acquire(self) -> None:
        """Raises CheckpointError if another process or run holds it. Idempotent."""
        if self._key is not None:
            return
        key = self._path.resolve()
        with _guard:
            if key in _held:
                raise self._refusal("another run of this process", f"process {os.getpid()}")
            self._lock()
            _held.add(key)
        self._key = key

    def _lock(self) -> None:
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(handle, 200).decode(errors="replace").strip()
            os.close(handle)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                logger.warning("%s can not be locked (%s): start no second run", self._path, error)
                return
            raise self._refusal("another process", holder) from error
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._handle = handle

    def _refusal(self, who: str, holder: str) -> CheckpointError:
        return CheckpointError(
            f"{who} writes to the run in {self._path.parent.parent} ({holder}): "
            "wait for it, end it, or choose another run.name"
        )

    def release(self) -> None:
        """Idempotent."""
        with _guard:
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None
            if self._key is not None:
                _held.discard(self._key)
                self._key = None
