"""Running a coroutine to its end, with signals that lead to orderly disposal."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEAVE_GRACE_S = 5.0
"""For tasks that were left over to end once they are cancelled."""


class Terminated(SystemExit):
    """The process was asked to end by SIGTERM, and everything was disposed of."""


def run_to_end(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run it in a new event loop. SIGTERM is handled like Ctrl-C: cancel, dispose, leave (143)."""
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(_ending(make))
    was_terminated = False

    async def body() -> T:
        task = asyncio.current_task()

        def terminate() -> None:
            nonlocal was_terminated
            was_terminated = True
            if task is not None:
                task.cancel()

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, terminate)
        try:
            return await make()
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
            await leave_behind()

    try:
        return asyncio.run(body())
    except asyncio.CancelledError:
        if was_terminated:
            raise Terminated(128 + signal.SIGTERM) from None
        raise


async def _ending(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    try:
        return await make()
    finally:
        await leave_behind()


async def leave_behind(grace_s: float = LEAVE_GRACE_S) -> list[str]:
    """Cancel what still runs in the loop, and forget what goes on all the same; returns its names.

    Code of the user's that swallows a cancellation would otherwise keep the process from ending.
    """
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=grace_s)
    late = [task for task in others if not task.done()]
    for task in late:
        logger.error("%s does not end although it was cancelled: it is left behind", task)
        asyncio.tasks._unregister_task(task)
    return [task.get_name() for task in late]
