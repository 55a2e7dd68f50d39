"""The requests that one server has open: each has an id, and can be ended at the server."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.engines.base import CutSignal
from paceline.engines.http import JsonClient, RefusedError

T = TypeVar("T")

ABORT_AGAIN_S = 0.5
"""A server forgets the abort of a request that has not come to it yet."""


@dataclass(slots=True, eq=False)
class _Open:
    is_over: asyncio.Event
    is_ended: bool = False
    """By `end_all`."""


class OpenRequests:
    """Of one event loop."""

    def __init__(
        self, client: JsonClient, abort: Callable[[Sequence[str]], Coroutine[Any, Any, object]]
    ) -> None:
        """abort: asks the server to end the requests of these ids; they answer with what they
        have. It may not know of some, or not know them yet."""
        self._client, self._abort = client, abort
        self._prefix, self._numbers = uuid.uuid4().hex[:12], itertools.count()
        self._open: dict[str, _Open] = {}
        self._idle = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    def new_id(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"

    async def run(self, rid: str, cut: CutSignal | None, answer: Awaitable[T]) -> tuple[T, bool]:
        """The answer, and whether `end_all` ended it. However the wait ends, nothing goes on at
        the server."""
        own = self._open[rid] = _Open(asyncio.Event())
        self._idle.clear()
        try:
            with self._cutting(rid, cut):
                return await answer, own.is_ended  # ends: by the time limit of the request
        except RefusedError:
            raise
        except BaseException:
            self._client.leave(self._abort([rid]))
            raise
        finally:
            own.is_over.set()
            del self._open[rid]
            if not self._open:
                self._idle.set()

    async def end_all(
        self, abort: Callable[[Sequence[str]], Awaitable[object]] | None = None
    ) -> None:
        """Abort all that is open, until it has answered. abort: used in the place of that which
        was given at first."""
        while self._open:
            for own in self._open.values():
                own.is_ended = True
            await (abort or self._abort)(list(self._open))
            await _within(self._idle, ABORT_AGAIN_S)

    @contextmanager
    def _cutting(self, rid: str, cut: CutSignal | None) -> Iterator[None]:
        """End the answer at the server when its request is cut."""
        if cut is None:
            yield
            return
        tasks: list[asyncio.Task[None]] = []
        with cut.listening(lambda: tasks.append(self._client.leave(self._end(rid)))):
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    async def _end(self, rid: str) -> None:
        """Abort until the answer is there."""
        while (own := self._open.get(rid)) is not None:
            await self._abort([rid])
            await _within(own.is_over, ABORT_AGAIN_S)


async def _within(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass
