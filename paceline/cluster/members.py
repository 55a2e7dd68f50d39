"""What a group needs of its members, whichever runtime their processes belong to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.cluster import wire
from paceline.cluster.failures import failure_of
from paceline.cluster.worker import Answer
from paceline.deadline import reason_of
from paceline.errors import WorkerError

THREAD_BYTES = 2**20
"""From here on a message is read in a thread, so that the event loop goes on."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long the workers of a group may take, in seconds."""

    start_s: float = 300.0
    call_s: float = 3600.0
    settle_s: float = 15.0
    """After a rank has failed: for the others to come to an end of the call, too."""
    cancel_s: float = 5.0
    """After a call was cancelled: for all ranks to come to an end of it."""
    close_s: float = 10.0
    """At the end: for all objects to close."""


class LostWorkerError(WorkerError):
    """The process of a rank is gone."""


class Member(Protocol):
    """One rank, as the driver sees it."""

    async def ask(self, payload: Any) -> Answer:
        """Raises LostWorkerError if its process ended or ends. Has no limit of its own."""

    async def close(self) -> None:
        """Have its object close, and its process end by itself. Has no limit of its own."""

    async def end(self) -> None:
        """End its process, and wait until it is gone. Idempotent."""

    async def show_stacks(self) -> None:
        """Have its threads' stacks written to its output."""

    async def last_output(self) -> str: ...


class Payload(Protocol):
    """A message that is ready to be sent to one or several ranks."""

    def close(self) -> None:
        """Let its memory go; nobody reads it any more. Idempotent."""


async def read_answer(message: wire.Message) -> Answer:
    """What a worker sent; a result that can not be read here is a failure of that rank."""
    if wire.size_of(message) < THREAD_BYTES:
        return _decoded(message)
    return await asyncio.to_thread(_decoded, message)


def _decoded(message: wire.Message) -> Answer:
    try:
        answer: Answer = wire.decode(message)
    # A result's class may be one that exists in the worker alone.
    except Exception as error:
        told = WorkerError(f"a result can not be read by the driver: {reason_of(error)}")
        return Answer(failure=failure_of(told))
    return answer
