"""Values that travel once and are read in several calls, of one worker group or of several.

A kept value is given to calls like any other argument, at whatever depth; the worker's method gets
the value itself, a copy of its own. It lies in shared memory of this machine, or in Ray's object
store, until its owner lets go of it and the last call that uses it has settled: whether calls work,
fail or are repeated makes no difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from paceline.cluster import wire
from paceline.deadline import reason_of
from paceline.errors import WorkerError

_sent: ContextVar[list[Kept] | None] = ContextVar("_sent", default=None)
"""The kept values in the message that is being made."""
_received: ContextVar[Sequence[wire.Message]] = ContextVar("_received", default=())
"""The kept values that came beside the message that is being read."""


class Kept:
    """A value where workers can read it. Made by `Cluster.keep`, which owns it."""

    def __init__(
        self, place: Any, free: Callable[[], None] = lambda: None, *, reference: Any = None
    ) -> None:
        """place: how workers find it; None: by a reference of Ray, beside the message."""
        self.reference = reference
        self._place = place
        self._free = free
        self._num_uses = 1
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        sent = _sent.get(None)
        if sent is None:
            raise TypeError("a kept value can only be sent as an argument of a worker's call")
        with self._lock:  # ends: nobody waits while holding it
            if not self._num_uses:
                raise WorkerError("a kept value was sent after its owner let go of it")
            self._num_uses += 1
        sent.append(self)
        if self._place is None:
            return _take, (len(sent) - 1,)
        return _open, self._place

    def release(self) -> None:
        """By the owner, and after each message that it was part of."""
        with self._lock:  # ends: nobody waits while holding it
            self._num_uses -= 1
            is_last = not self._num_uses
        if is_last:
            self.reference = None
            self._free()


def encode(value: Any, *, by_value: bool = False) -> tuple[wire.Message, list[Kept]]:
    """See `wire.encode`; with the kept values in it, each to be released after the message."""
    sent: list[Kept] = []
    token = _sent.set(sent)
    try:
        return wire.encode(value, by_value=by_value), sent
    except BaseException:
        for kept in sent:
            kept.release()
        raise
    finally:
        _sent.reset(token)


@contextlib.asynccontextmanager
async def kept_by(keep: Callable[[Any], Kept], value: Any) -> AsyncIterator[Kept]:
    """A kept value of this owner, which lets go of it at the end."""
    keeping = asyncio.ensure_future(asyncio.to_thread(keep, value))
    try:
        await asyncio.shield(keeping)  # ends: when the value is copied
    except asyncio.CancelledError:
        keeping.add_done_callback(_release)
        raise
    except Exception as error:
        raise WorkerError(f"a value can not be kept for workers: {reason_of(error)}") from error
    kept = keeping.result()
    try:
        yield kept
    finally:
        kept.release()


def _release(keeping: asyncio.Task[Kept]) -> None:
    if keeping.exception() is None:
        keeping.result().release()


@contextlib.contextmanager
def receiving(beside: Sequence[wire.Message]) -> Iterator[None]:
    """While a message is read, with what came beside it."""
    token = _received.set(beside)
    try:
        yield
    finally:
        _received.reset(token)


def keep_here(value: Any) -> Kept:
    """In memory of this machine, gone with this process."""
    message = wire.encode(value)
    if not hasattr(os, "memfd_create"):
        return Kept((None, message))
    packed = wire.Packed(message, min_shared_bytes=0)
    return Kept((packed.path, [len(part) for part in message]), packed.close)


def _open(path: bytes | None, parts: Any) -> Any:
    return wire.decode(parts if path is None else wire.map_message(path, parts))


def _take(index: int) -> Any:
    return wire.decode(_received.get(())[index])
