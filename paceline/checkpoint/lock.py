"""One writer per run: a lock that the system drops when its process dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from pathlib import Path

from paceline.errors import CheckpointError

logger = logging.getLogger(__name__)


class FolderLock:
    """A POSIX record lock on a file: child processes do not inherit it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None

    def acquire(self) -> None:
        """Raises CheckpointError if another process holds it. Idempotent."""
        if self._handle is not None:
            return
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(handle, 200).decode(errors="replace").strip()
            os.close(handle)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                logger.warning("%s can not be locked (%s): start no second run", self._path, error)
                return
            raise CheckpointError(
                f"another process writes to the run in {self._path.parent.parent} ({holder}): "
                "wait for it, end it, or choose another run.name"
            ) from error
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._handle = handle

    def release(self) -> None:
        """Idempotent."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
