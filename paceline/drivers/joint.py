"""What the driver of several clocks orders: one run a policy, and what stands between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from paceline.drivers.board import Board
from paceline.drivers.gate import Gate
from paceline.drivers.run import Run
from paceline.observe.metrics import Metrics

Quiet = Callable[[], AbstractAsyncContextManager[None]]


class Lead:
    """How far a follower may be ahead of the leader."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        """limits: follower -> most steps; a follower that is not named has no limit."""
        self._limits = dict(limits)
        self._leader_step = 0
        self._waiting: dict[asyncio.Future[None], int] = {}

    def leader_trained(self, step: int) -> None:
        """The leader has come so far."""
        self._leader_step = step
        for future, needed in list(self._waiting.items()):
            if needed <= step and not future.done():
                future.set_result(None)

    async def wait(self, follower: str, step: int) -> None:
        """Until the follower may begin this step."""
        limit = self._limits.get(follower)
        if limit is None or step <= self._leader_step + limit:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = step - limit
        try:
            await future  # ends: with the leader's step, or with the run
        finally:
            del self._waiting[future]


@dataclass(slots=True)
class Joint:
    """The clocks of a run of several policies. Built by `paceline.build`."""

    leader: Run
    board: Board
    gate: Gate
    """Its members are all policies."""
    producers: Mapping[str, Callable[[], Coroutine[Any, Any, None]]]
    """What samples ahead of the clocks, by name."""
    quiet: Quiet
    """Held while the leader measures, where nothing else may be sampled meanwhile."""
    lead: Lead
    poll_s: float = 1.0
    """How often a save that is asked for is looked for while the leader waits for data."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the run is over."""

    @asynccontextmanager
    async def alone(self, run: Run) -> AsyncIterator[None]:
        """Hold the gate for a policy: meanwhile no weights change but by its own doing."""
        name, waited_s = run.policy.name, self.gate.waited_s
        run.board.enter(name, "waiting for the others to come to rest")
        async with self.gate.exclusive(by=name):
            metrics = Metrics()
            metrics.sum("time/gate_wait_s", self.gate.waited_s - waited_s)
            run.recorder.log(name, metrics)
            yield

    @asynccontextmanager
    async def resting(self, run: Run, doing: str) -> AsyncIterator[None]:
        """A safe region of a policy, whose end may have to wait for the gate."""
        name, kept_s = run.policy.name, self.gate.kept_s(run.policy.name)
        async with self.gate.safe_region(name):
            run.board.enter(name, doing)
            yield
            run.board.enter(name, "held at the gate")
        run.board.enter(name, "working")
        metrics = Metrics()
        metrics.sum("time/held_s", self.gate.kept_s(name) - kept_s)
        run.recorder.log(name, metrics)

    @property
    def followers(self) -> dict[str, Run]:
        return {run.policy.name: run for run in self.leader.others}

    @property
    def runs(self) -> Iterator[Run]:
        """Followers first."""
        yield from self.leader.others
        yield self.leader
