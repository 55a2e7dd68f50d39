"""Running a coroutine to its end, with signals that lead to orderly disposal."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Terminated(SystemExit):
    """The process was asked to end by SIGTERM, and everything was disposed of."""


def run_to_end(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run it in a new event loop. SIGTERM is handled like Ctrl-C: cancel, dispose, leave (143)."""
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(make())
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

    try:
        return asyncio.run(body())
    except asyncio.CancelledError:
        if was_terminated:
            raise Terminated(128 + signal.SIGTERM) from None
        raise
