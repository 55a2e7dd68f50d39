"""One owner for everything that must be closed, in reverse order, on every way out."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType

logger = logging.getLogger(__name__)

Close = Callable[[], Awaitable[None] | None]


class Disposer:
    """Closes what was added to it, last added first, on success, error and cancellation.

    Every close runs, even after one failed or timed out, and even if the task is cancelled again
    meanwhile. The error of the body is never masked: failures of closing become notes on it. After
    a clean body the first failure of closing is raised.
    """

    def __init__(self) -> None:
        self._owned: list[tuple[str, Close, float]] = []

    def add(self, name: str, close: Close, *, timeout_s: float = 30.0) -> None:
        """Own something; `close` gets `timeout_s` seconds."""
        self._owned.append((name, close, timeout_s))

    async def dispose(self) -> list[Exception]:
        """Close everything once; returns what went wrong."""
        failures: list[Exception] = []
        while self._owned:
            name, close, timeout_s = self._owned.pop()
            try:
                result = close()
                if inspect.isawaitable(result):
                    await asyncio.wait_for(result, timeout_s)
            except TimeoutError:
                failures.append(TimeoutError(f"closing {name} took more than {timeout_s} s"))
            except asyncio.CancelledError:
                failures.append(RuntimeError(f"closing {name} was cut short"))
            except Exception as error:
                error.add_note(f"while closing {name}")
                failures.append(error)
        return failures

    async def __aenter__(self) -> Disposer:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        failures = await self.dispose()
        for failure in failures:
            logger.warning("disposal: %s", failure)
            if error is not None:
                error.add_note(f"also, at disposal: {failure}")
        if error is None and failures:
            raise failures[0]
