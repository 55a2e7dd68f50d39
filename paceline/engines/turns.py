"""One engine at a time, so that several engines in one process are reproducible bit for bit.

What an engine computes depends, in the last bit, on which requests it computes together, and where
episodes go from one engine to the next that depends on which engine is faster. With turns, an
engine runs only while all others rest and everything that an answer has set off has come to rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

QUIET_TURNS = 8
"""Turns of the event loop in which nothing moved, after which everything is at rest."""


class Turns:
    """Shared by the engines of a run. Of those that have work, the one that joined first goes."""

    def __init__(self) -> None:
        self._num_joined = 0
        self._wanting: dict[int, asyncio.Future[None]] = {}
        self._holder: int | None = None
        self._num_outside = 0
        self._moves = 0
        self._granter: asyncio.Task[None] | None = None
        self._left: set[int] = set()

    def add_engine(self) -> int:
        """The place of a new engine."""
        self._num_joined += 1
        return self._num_joined - 1

    def leave(self, place: int) -> None:
        """That engine closes: it waits for no turn any more."""
        self._left.add(place)
        future = self._wanting.pop(place, None)
        if future is not None and not future.done():
            future.set_result(None)

    def moved(self) -> None:
        """Something happened that may set off requests, or is one."""
        self._moves += 1

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Work elsewhere, such as a reward's, whose result may set off requests: no turn before."""
        self._num_outside += 1
        try:
            yield
        finally:
            self._num_outside -= 1
            self.moved()
            self._start_granting()

    @asynccontextmanager
    async def turn(self, place: int) -> AsyncIterator[None]:
        """Wait for the turn of the engine at `place`, and hold it for the block."""
        if place in self._left:
            yield
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wanting[place] = future
        self.moved()
        self._start_granting()
        try:
            await future  # ends: when the others rest, and each of their turns is one job
        except asyncio.CancelledError:
            self._wanting.pop(place, None)
            self._release(place)
            raise
        try:
            yield
        finally:
            self._release(place)

    def _release(self, place: int) -> None:
        if self._holder == place:
            self._holder = None
            self.moved()
            self._start_granting()

    def _start_granting(self) -> None:
        is_idle = self._granter is None or self._granter.done()
        if is_idle and self._wanting and self._holder is None and not self._num_outside:
            self._granter = asyncio.create_task(self._grant(), name="turns")

    async def _grant(self) -> None:
        seen, quiet = self._moves, 0
        while quiet < QUIET_TURNS:
            await asyncio.sleep(0)
            quiet = quiet + 1 if self._moves == seen else 0
            seen = self._moves
            if self._holder is not None or self._num_outside or not self._wanting:
                return
        place = min(self._wanting)
        self._holder = place
        future = self._wanting.pop(place)
        if not future.done():
            future.set_result(None)
        else:
            self._release(place)
