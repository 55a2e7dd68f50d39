"""The thread in which a trainer works, so that the event loop goes on: one call at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TypeVar

from paceline.errors import TrainerError

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


async def in_thread(name: str, work: Callable[[], Result]) -> Result:
    """Call it in a thread of its own. Cancelled: the work has ended before this raises."""
    thread = WorkThread(name)
    try:
        return await thread.run(work)
    finally:
        thread.close()


class WorkThread:
    """Runs calls; a cancelled one ends at its next `check`, and the thread is idle again."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._stop = Event()

    async def run(self, work: Callable[[], Result]) -> Result:
        """Call it in the thread. Cancelled: the thread is idle before this raises."""
        stop = Event()

        def job() -> Result:
            self._stop = stop
            return work()

        future = asyncio.get_running_loop().run_in_executor(self._pool, job)
        try:
            return await asyncio.shield(future)  # ends: with the work, which waits for nobody
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([future])  # ends: at the next `check`, or with the work
            if not future.cancelled() and (error := future.exception()) is not None:
                logger.debug("a cancelled call of the trainer ended with %r", error)
            raise

    def check(self) -> None:
        """For the work itself, where it may end: raises TrainerError if nobody waits for it."""
        if self._stop.is_set():
            raise TrainerError("the trainer was stopped between two micro-batches")

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        # ends: at the next `check`, or with the work
        self._pool.shutdown(wait=True, cancel_futures=True)
