"""What runs in a worker process: one object, made there, whose methods are called from outside.

The same for child processes of this machine and for actors of Ray.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.cluster import wire
from paceline.cluster.base import Rank
from paceline.cluster.failures import Failure, failure_of
from paceline.errors import WorkerError
from paceline.user_code import add_to_path

CLOSE = "aclose"
"""Asked for by this name, the object closes; the process is to end after the answer."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a worker."""

    rank: Rank
    make: Callable[..., Any]
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker answers to each message."""

    value: Any = None
    failure: Failure | None = None


class Worker:
    """Holds the object of one rank."""

    def __init__(self) -> None:
        self._object: Any = None
        self._loop = asyncio.Runner()
        self.is_closed = False

    def answer(self, message: wire.Message) -> wire.Message:
        """To a `Start`, or to (method, arguments). Raises nothing."""
        answer = self._run(lambda: self._do(message))
        try:
            return wire.encode(answer)
        except Exception as error:
            kind = type(answer.value).__name__
            told = WorkerError(f"a result ({kind}) can not be sent to the driver: {error}")
            return wire.encode(Answer(failure=failure_of(told)))

    def _do(self, message: wire.Message) -> Any:
        request = wire.decode(message)
        if isinstance(request, Start):
            self._object = request.make(request.rank, **request.arguments)
            return None
        method, arguments = request
        if method == CLOSE:
            self.is_closed = True
            return self._close()
        return self._find(method)(*arguments)

    def _find(self, method: str) -> Callable[..., Any]:
        found: Callable[..., Any] | None = getattr(self._object, method, None)
        if method.startswith("_") or not callable(found):
            raise WorkerError(f"{type(self._object).__name__} has no method {method!r} to call")
        return found

    def _close(self) -> Any:
        for name in ("aclose", "close"):
            if callable(close := getattr(self._object, name, None)):
                return close()
        return None

    def _run(self, step: Callable[[], Any]) -> Answer:
        try:
            value = step()
            if inspect.isawaitable(value):
                value = self._loop.run(_wait_for(value))
            return Answer(value)
        # Every message is answered, whatever user code raises; what it means the driver decides.
        except BaseException as error:
            return Answer(failure=failure_of(error))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


async def _wait_for(value: Awaitable[Any]) -> Any:
    return await value  # ends: the driver ends the process at its time limit


def prepare_process(paths: Sequence[str]) -> None:
    """Find the driver's modules, and show what every thread does when asked or on a crash."""
    add_to_path(paths)
    faulthandler.enable(sys.stderr)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)


def quit_process(code: int) -> None:
    """End now: libraries that wait at exit for peers that are gone can not hold it up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
