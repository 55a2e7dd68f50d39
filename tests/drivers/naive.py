"""The protocols that the gate and the supervisor replace, with their faults, to test the tests.

Each fault is one that a plausible first version has, and that no test of the good case shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any


class NaiveBarrier:
    """A count and two events. Followers come to it between their steps and nowhere else.

    Faults: who has not woken up yet counts for the next request; nothing is released when the body
    raises; waiting for data is not rest; nobody who died is missed; no deadline, no failure.
    """

    def __init__(self, num_followers: int) -> None:
        self._num_followers = num_followers
        self._num_parked = 0
        self._is_requested = False
        self._all_parked = asyncio.Event()
        self._released = asyncio.Event()

    async def park_if_asked(self) -> None:
        if not self._is_requested:
            return
        self._num_parked += 1
        if self._num_parked == self._num_followers:
            self._all_parked.set()
        await self._released.wait()
        self._num_parked -= 1

    @asynccontextmanager
    async def all_parked(self) -> AsyncIterator[None]:
        self._is_requested = True
        self._released.clear()
        if self._num_parked < self._num_followers:
            self._all_parked.clear()
            await self._all_parked.wait()
        yield
        self._is_requested = False
        self._released.set()


async def naive_supervise(
    leader: Coroutine[Any, Any, Any], followers: Mapping[str, Coroutine[Any, Any, Any]]
) -> Any:
    """The first end is the end of all, whatever it is; what is cancelled is waited for in full.

    Faults: a follower that ends early is a success; of two that end together, any one counts; a
    swallowed cancellation holds the run up for as long as it likes.
    """
    tasks = [asyncio.create_task(leader)]
    tasks += [asyncio.create_task(work) for work in followers.values()]
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    first = next(task for task in tasks if task in done)
    return first.result()


async def naive_abandon(
    leader: Coroutine[Any, Any, Any], followers: Mapping[str, Coroutine[Any, Any, Any]]
) -> Any:
    """Fault: what is cancelled is not waited for."""
    tasks = [asyncio.create_task(work) for work in followers.values()]
    try:
        return await leader
    finally:
        for task in tasks:
            task.cancel()


async def naive_gather(
    leader: Coroutine[Any, Any, Any], followers: Mapping[str, Coroutine[Any, Any, Any]]
) -> Any:
    """Fault: waits for all, so for one that waits for another that has failed."""
    results = await asyncio.gather(leader, *followers.values(), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise errors[0]
    return results[0]


async def naive_settle(works: Mapping[str, Coroutine[Any, Any, Any]]) -> dict[str, Any]:
    """Fault: raises at the first error, while the others go on."""
    return dict(zip(works, await asyncio.gather(*works.values()), strict=True))


class NaiveRegions:
    """Safe regions that can be left while a request waits.

    Fault: members that are never all inside at one moment starve the leader.
    """

    def __init__(self, members: set[str]) -> None:
        self._outside = set(members)
        self._changed = asyncio.Condition()
        self._is_held = False

    @asynccontextmanager
    async def safe_region(self, member: str) -> AsyncIterator[None]:
        async with self._changed:
            self._outside.discard(member)
            self._changed.notify_all()
        yield
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_held)
            self._outside.add(member)

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._outside)
            self._is_held = True
        yield
        async with self._changed:
            self._is_held = False
            self._changed.notify_all()
