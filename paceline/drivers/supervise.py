"""Several tasks that are one run: who may end, what ends the run, and what is left behind: nothing.

    how a task ends              the run
    leader returns               succeeds, with its result
    producer returns             goes on: its data has come to an end
    follower returns             fails: it would leave its policy behind
    anybody raises               fails with that error; errors of others become notes on it
    anybody is cancelled alone   fails
    the run is cancelled         is cancelled

If tasks end together, an error counts before the leader's return, and that before a follower's. At
every end the tasks that still run are cancelled and waited for, for a bounded time; one that goes
on all the same makes the run fail, or is named in a note if it has failed already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from paceline.deadline import STOP_GRACE_S, reason_of, stop
from paceline.errors import SupervisionError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Work = Coroutine[Any, Any, object]
NOBODY: Mapping[str, Work] = MappingProxyType({})


async def supervise(
    leader: Coroutine[Any, Any, T],
    followers: Mapping[str, Work],
    producers: Mapping[str, Work] = NOBODY,
    *,
    on_end: Callable[[], None] | None = None,
    grace_s: float = STOP_GRACE_S,
) -> T:
    """Run all of them until the run ends; returns the leader's result once all have ended.

    The others begin when the leader has taken its first step: a leader that has nothing left to do
    starts nobody. on_end: called once, just before the others are cancelled; work that may swallow
    a cancellation reads what it sets. grace_s: seconds that cancelled tasks have to end. An error
    that a task raises while it is stopped after a good end is logged, and not raised.

    Raises the first error, SupervisionError for an end that should not be, or CancelledError.
    """
    works = [(f"follower {name!r}", work) for name, work in followers.items()]
    works += [(f"producer {name!r}", work) for name, work in producers.items()]
    crew = _Crew()
    lead = crew.start("the leader", leader)
    tasks: list[asyncio.Task[object]] = []
    error: BaseException | None = None
    try:
        await asyncio.sleep(0)
        if not lead.done():
            tasks += [crew.start(name, work) for name, work in works]
        await crew.until_one_ends(may_return=set(tasks[len(followers) :]))
        error = crew.first_error()
        if error is None and not lead.done():
            error = _early_end(next(task for task in tasks[: len(followers)] if task.done()))
    except asyncio.CancelledError as cancelled:
        error = cancelled
    for _, work in works[len(tasks) :]:
        work.close()
    try:
        if on_end is not None:
            on_end()
    except Exception as failure:
        error = error or failure
    await crew.end(error, grace_s)
    return lead.result()


def _early_end(task: asyncio.Task[object]) -> SupervisionError:
    return SupervisionError(
        f"{task.get_name()} ended before the run did. The leader decides when a run is over; a "
        "follower that has come to the end of its data has to wait for that"
    )


async def settle(
    works: Mapping[str, Coroutine[Any, Any, T]], *, grace_s: float = STOP_GRACE_S
) -> dict[str, T]:
    """Wait until *all* have ended; then their results by name, or the first error.

    For work that must not go on behind its caller's back, like the saves of several policies: the
    error of one is raised when the others have ended too; their errors become notes. If the caller
    is cancelled, all are, and are waited for.
    """
    crew = _Crew()
    tasks = {name: crew.start(f"the work of {name!r}", work) for name, work in works.items()}
    error: BaseException | None = None
    try:
        await crew.until_all_end()
        error = crew.first_error()
    except asyncio.CancelledError as cancelled:
        error = cancelled
    await crew.end(error, grace_s)
    return {name: task.result() for name, task in tasks.items()}


class _Crew:
    """Tasks, and the order in which they ended."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []
        self._ended: list[asyncio.Task[Any]] = []

    def start(self, name: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.append(task)
        task.add_done_callback(self._ended.append)
        return task

    async def until_one_ends(self, may_return: Collection[asyncio.Task[Any]]) -> None:
        """Wait for an end that is the end of all: any but the return of one that may."""
        running = set(self._tasks)
        while True:
            # ends: with the run, whose tasks have limits of their own, or with the caller
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if any(task not in may_return or _error_of(task) is not None for task in done):
                return

    async def until_all_end(self) -> None:
        if self._tasks:
            # ends: with the works, which have limits of their own, or with the caller
            await asyncio.wait(self._tasks)

    def first_error(self) -> BaseException | None:
        """What the first task to fail has raised; a cancellation by another hand comes after."""
        errors = self._errors()
        for task, error in errors:
            if not isinstance(error, asyncio.CancelledError):
                error.add_note(f"in {task.get_name()}")
                return error
        for task, _ in errors:
            return SupervisionError(f"{task.get_name()} was cancelled while the run went on")
        return None

    async def end(self, error: BaseException | None, grace_s: float) -> None:
        """Stop all, then raise the error, with what else went wrong as notes on it.

        If there is none, a task that does not stop is one.
        """
        interrupted = await self._stop(grace_s)
        late = [
            f"{task.get_name()} was cancelled and went on for more than {grace_s:g} s"
            for task in self._tasks
            if not task.done()
        ]
        also = [
            f"{task.get_name()}: {reason_of(failure)}"
            for task, failure in self._errors()
            if failure is not error and not isinstance(failure, asyncio.CancelledError)
        ]
        if error is None or isinstance(error, asyncio.CancelledError):
            for text in also + late:
                logger.warning("while the run was being stopped: %s", text)
        error = error or interrupted
        if error is None and late:
            raise SupervisionError("; ".join(late))
        if error is not None:
            for text in also + late:
                error.add_note(f"also, {text}")
            raise error

    async def _stop(self, grace_s: float) -> asyncio.CancelledError | None:
        """Even if the caller is cancelled, again, meanwhile; returns that."""
        interrupted: asyncio.CancelledError | None = None
        stopping = asyncio.create_task(stop(*self._tasks, grace_s=grace_s))
        while not stopping.done():
            try:
                # ends: with the grace of `stop`
                await asyncio.wait({stopping})
            except asyncio.CancelledError as cancelled:
                interrupted = cancelled
        return interrupted

    def _errors(self) -> list[tuple[asyncio.Task[Any], BaseException]]:
        """Every error once, in the order of the ends. A cancelled task has a CancelledError."""
        ended = dict.fromkeys([*self._ended, *(task for task in self._tasks if task.done())])
        found: dict[int, tuple[asyncio.Task[Any], BaseException]] = {}
        for task in ended:
            error = _error_of(task)
            if error is not None:
                found.setdefault(id(error), (task, error))
        return list(found.values())


def _error_of(task: asyncio.Task[Any]) -> BaseException | None:
    return asyncio.CancelledError() if task.cancelled() else task.exception()
