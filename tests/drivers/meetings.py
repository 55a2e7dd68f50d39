"""A barrier or a gate in one and the same run; what members and holders of a gate do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from drivers.naive import NaiveBarrier

from paceline.drivers.gate import Gate


class Meeting(Protocol):
    """What a barrier and a gate have in common, to put either into the same run."""

    def waiting(self, member: str) -> AbstractAsyncContextManager[None]: ...

    async def between_steps(self, member: str) -> None: ...

    def alone(self) -> AbstractAsyncContextManager[None]: ...


class WithBarrier:
    def __init__(self, *members: str) -> None:
        self.barrier = NaiveBarrier(len(members))

    @asynccontextmanager
    async def waiting(self, member: str) -> AsyncIterator[None]:
        yield

    async def between_steps(self, member: str) -> None:
        await self.barrier.park_if_asked()

    def alone(self) -> AbstractAsyncContextManager[None]:
        return self.barrier.all_parked()


class WithGate:
    def __init__(self, *members: str, **options: Any) -> None:
        options = {"deadline_s": None, "clock": asyncio.get_running_loop().time} | options
        self.gate = Gate(members, **options)

    def waiting(self, member: str) -> AbstractAsyncContextManager[None]:
        return self.gate.safe_region(member)

    async def between_steps(self, member: str) -> None:
        async with self.gate.safe_region(member):
            pass

    def alone(self) -> AbstractAsyncContextManager[None]:
        return self.gate.exclusive()


Make = Callable[..., Meeting]


@dataclass
class Busy:
    """Who changes weights just now, and whether nobody may."""

    training: int = 0
    is_alone: bool = False
    num_violations: int = 0

    def check(self) -> None:
        self.num_violations += self.is_alone and self.training > 0

    async def train(self, seconds: float) -> None:
        self.training += 1
        await asyncio.sleep(seconds)
        self.training -= 1

    async def save(self, meeting: Meeting, seconds: float) -> None:
        async with meeting.alone():
            self.is_alone = True
            await asyncio.sleep(seconds)
            self.is_alone = False


async def ended(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def gate_of(*members: str, deadline_s: float | None = None, report: str = "") -> Gate:
    clock = asyncio.get_running_loop().time
    return Gate(members, deadline_s=deadline_s, report=lambda: report, clock=clock)


async def pass_through(gate: Gate, member: str) -> None:
    async with gate.safe_region(member):
        pass


async def hold(gate: Gate, seconds: float = 0.0, **options: Any) -> float:
    """Hold the gate; returns when it was granted."""
    async with gate.exclusive(**options):
        at = asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
    return at


async def rest(gate: Gate, member: str, seconds: float) -> float:
    """Be in a region for a while; returns when it was left."""
    async with gate.safe_region(member):
        await asyncio.sleep(seconds)
    return asyncio.get_running_loop().time()


async def settled(rounds: int = 20) -> None:
    """Let everybody run until they wait for time or each other."""
    for _ in range(rounds):
        await asyncio.sleep(0)
