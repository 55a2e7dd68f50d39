"""Waiting for work of others, with a time limit and without being taken down by its failure."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from paceline.errors import DeadlineError, EngineError

T = TypeVar("T")

STOP_GRACE_S = 10.0
"""Seconds that cancelled work has to stop; then it is left behind."""


async def bounded(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """The result of the work. It is stopped when the caller is cancelled or the time is up.

    Raises DeadlineError when the time is up, EngineError if the work was cancelled by another
    hand, and otherwise what the work raises.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise DeadlineError(f"took longer than {timeout_s:g} s")
    finally:
        await stop(task)
    return result_of(task)


async def stop(*tasks: asyncio.Task[Any], grace_s: float = STOP_GRACE_S) -> None:
    """Cancel what still runs and wait until it has ended, for `grace_s` at most."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running, timeout=grace_s)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # seen: asyncio would otherwise report it as never retrieved


def result_of(task: asyncio.Task[T]) -> T:
    """The result of a task that was waited for. Its cancellation is its failure, not ours."""
    if not task.done():
        raise DeadlineError("did not stop when it was cancelled")
    if task.cancelled():
        raise EngineError("was cancelled")
    return task.result()


def reason_of(error: BaseException) -> str:
    """One line for people: what kind of error, and what it says."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
