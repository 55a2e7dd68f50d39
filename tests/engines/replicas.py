"""Replicas, suppliers and a source of weights without servers, for tests of the router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from paceline.engines.base import Completion, Part, Request
from paceline.engines.http import LostServerError
from paceline.errors import EngineError, WeightError
from paceline.weights.base import Meeting, Parcel, PauseMode, TensorInfo, Transport, WeightPlan


class FakeWeights:
    def __init__(self, owner: FakeReplica) -> None:
        self.num_devices = 1
        self.held = 0
        self.calls: list[Any] = []
        self.fail: dict[str, Exception] = {}
        self.hang: set[str] = set()
        self._owner = owner

    async def _do(self, name: str, *values: Any) -> None:
        self.calls.append((name, *values))
        if name in self.hang:
            await asyncio.Event().wait()
        if not self._owner.is_there:
            raise LostServerError("gone", is_cut_off=True)
        if name in self.fail:
            raise self.fail[name]

    async def version(self) -> int | None:
        await self._do("version")
        return self.held

    async def join(self, meeting: Meeting, first_rank: int) -> None:
        await self._do("join", meeting.name, first_rank, meeting.size)

    async def begin(self, transport: Transport) -> None:
        await self._do("begin", transport)

    async def take(self, parcel: Parcel, transport: Transport) -> None:
        await self._do("take", parcel)

    async def end(self, version: int) -> None:
        await self._do("end", version)
        self.held = version

    async def read(self, info: TensorInfo) -> list[float] | None:
        return None


class FakeReplica:
    """Answers when it is told to: `release`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.weights = FakeWeights(self)
        self.is_there = True
        self.manual = False
        self.calls: list[str] = []
        self.requests: list[Request] = []
        self.fail: Exception | None = None
        self._waiting: list[asyncio.Future[None]] = []

    def kill(self) -> None:
        """All that is open on it is lost, and all that comes."""
        self.is_there = False
        for future in self._waiting:
            if not future.done():
                future.set_exception(LostServerError(f"{self.name} is gone", is_cut_off=True))

    def release(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def generate(self, request: Request) -> Completion:
        self._refuse_if_gone()
        self.requests.append(request)
        if self.fail is not None:
            raise self.fail
        if self.manual:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future
        return Completion([7], [-0.5], [self.weights.held], "stop", stop=7)

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        self._refuse_if_gone()
        return [0.0] * len(tokens)

    async def check(self) -> None:
        self._refuse_if_gone()

    async def pause(self, mode: PauseMode) -> None:
        await self._note(f"pause {mode}")

    async def resume(self) -> None:
        await self._note("resume")

    async def sleep(self, parts: frozenset[Part]) -> None:
        await self._note(f"sleep {'+'.join(sorted(parts))}")

    async def wake(self, parts: frozenset[Part]) -> None:
        await self._note(f"wake {'+'.join(sorted(parts))}")

    async def _note(self, call: str) -> None:
        self._refuse_if_gone()
        self.calls.append(call)

    def _refuse_if_gone(self) -> None:
        if not self.is_there:
            raise LostServerError(f"{self.name} is gone", is_cut_off=True)


class FakeSupplier:
    """Starts a new fake each time."""

    def __init__(self, number: int, *, is_ours: bool = True, manual: bool = False) -> None:
        self.name = f"replica {number}"
        self.is_ours, self.manual = is_ours, manual
        self.started: list[FakeReplica] = []
        self.fail: EngineError | None = None
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.is_stopped = False

    @property
    def replica(self) -> FakeReplica:
        return self.started[-1]

    async def start(self, version: int) -> FakeReplica:
        await self.may_start.wait()
        if self.fail is not None:
            raise self.fail
        replica = FakeReplica(f"{self.name}, start {len(self.started)}")
        replica.manual = self.manual
        replica.weights.held = version
        self.started.append(replica)
        return replica

    async def problem(self) -> str | None:
        return None if self.replica.is_there else f"{self.name} was ended by signal 9"

    async def stop(self) -> None:
        self.is_stopped = True


class FakeSource:
    """Three parcels, and a broadcast that ends when it is told to."""

    def __init__(self, *, changed: str | None = None) -> None:
        self.log: list[str] = []
        self.broadcasts_hang = False
        self.fail_broadcast: Exception | None = None
        self.changed = changed
        self._ports = 0

    async def parcels(self) -> AsyncIterator[Parcel]:
        try:
            for number in range(3):
                self.log.append(f"parcel {number}")
                yield Parcel((), handles=(str(number),), folder="/full", changed=self.changed)
        finally:
            self.log.append("closed")

    async def meeting_point(self) -> tuple[str, int]:
        self._ports += 1
        return "127.0.0.1", self._ports

    async def meet(self, meeting: Meeting) -> None:
        self.log.append(f"meet at {meeting.port} of {meeting.size}")

    async def broadcast(self, parcel: Parcel) -> None:
        self.log.append("broadcast")
        if self.fail_broadcast is not None:
            raise self.fail_broadcast
        if self.broadcasts_hang:
            try:
                await asyncio.Event().wait()
            finally:
                self.log.append("broadcast ended")

    async def checksums(self) -> Mapping[str, str]:
        return {}


def plan(
    version: int, transport: Transport = "handles", source: FakeSource | None = None
) -> WeightPlan:
    return WeightPlan("policy", version, transport, source=source or FakeSource())


def refused() -> WeightError:
    return WeightError("the server refused")
