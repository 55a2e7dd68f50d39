"""What the driver of several clocks orders: one run a policy, and what stands between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from paceline.drivers import steps
from paceline.drivers.board import Board
from paceline.drivers.gate import Gate
from paceline.drivers.run import Run
from paceline.errors import GateError
from paceline.observe.metrics import Metrics

Quiet = Callable[[], AbstractAsyncContextManager[None]]


class Lead:
    """How far a follower may be ahead of the leader."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        """limits: follower -> most steps; a follower that is not named has no limit."""
        self.on_wait: Callable[[], None] = _nothing
        """Called when a follower begins to wait."""
        self.holds_leader_up: Callable[[str], bool] = _nobody
        """True of a follower whom the leader waits for: it may go on, however far ahead it is."""
        self._limits = dict(limits)
        self._leader_step = 0
        self._waiting: dict[asyncio.Future[None], str] = {}
        self._needed: dict[str, int] = {}

    def leader_trained(self, step: int) -> None:
        """The leader has come so far."""
        self._leader_step = step
        self.look()

    def look(self) -> None:
        """Let those go who may: the leader has moved, or may have come to wait for one of them."""
        for future, follower in list(self._waiting.items()):
            if self._may_begin(follower, self._needed[follower]) and not future.done():
                future.set_result(None)
                del self._waiting[future]

    def _may_begin(self, follower: str, step: int) -> bool:
        limit = self._limits.get(follower)
        if limit is None or step <= self._leader_step + limit:
            return True
        return self.holds_leader_up(follower)

    async def wait(self, follower: str, step: int) -> None:
        """Until the follower may begin this step."""
        if self._may_begin(follower, step):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future], self._needed[follower] = follower, step
        self.on_wait()
        try:
            await future  # ends: with the leader's step, or with the run
        finally:
            self._waiting.pop(future, None)

    def is_waiting(self, follower: str) -> bool:
        return follower in self._waiting.values()


def _nothing() -> None:
    """Nobody asks to be called."""


def _nobody(follower: str) -> bool:
    return False


@dataclass(slots=True)
class Joint:
    """The clocks of a run of several policies. Built by `paceline.build`."""

    leader: Run
    board: Board
    gate: Gate
    """Its members are all policies."""
    producers: Mapping[str, Callable[[], Coroutine[Any, Any, None]]]
    """What samples ahead of the clocks, by name."""
    is_deterministic: bool
    """The leader comes in only when every follower waits for it: where each of them stands at a
    save or an eval then depends on counts alone."""
    quiet: Quiet
    """Held while the leader measures, where nothing else may be sampled meanwhile."""
    lead: Lead
    poll_s: float = 1.0
    """How often a save that is asked for is looked for while the leader waits for data."""
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever a policy may have come to wait for the leader."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the run is over."""

    def __post_init__(self) -> None:
        self.lead.on_wait = self.moved.set
        for run in self.leader.others:
            run.supply.listen(self.moved.set)
        followers, supply = self.followers, self.leader.supply
        self.lead.holds_leader_up = lambda name: followers[name].supply.holds_up(supply)
        supply.listen(self.lead.look)

    @contextmanager
    def member(self, run: Run) -> Iterator[None]:
        """The life of a policy's clock; after its end nobody waits for it."""
        with self.gate.membership(run.policy.name):
            yield
        self.moved.set()

    @asynccontextmanager
    async def alone(self, run: Run) -> AsyncIterator[None]:
        """Hold the gate for a policy: meanwhile no weights change but by its own doing.

        Nobody is kept there by a save in the background: that is waited for before.
        """
        name, waited_s = run.policy.name, self.gate.waited_s
        run.board.enter(name, "waiting for the others to come to rest")
        await steps.settle_save(run)
        if self.is_deterministic:
            await self._all_wait_for_leader()
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

    async def _all_wait_for_leader(self) -> None:
        try:
            async with asyncio.timeout(self.gate.deadline_s):
                while not all(self._is_at_rest(other) for other in self.leader.others):
                    self.moved.clear()
                    await self.moved.wait()
        except TimeoutError as error:
            raise GateError(
                f"waited {self.gate.deadline_s:g} s for every policy to wait for the leader; if a "
                f"step takes that long, allow more time (run.gate_timeout_s).\n"
                f"{self.board.report()}"
            ) from error

    def _is_at_rest(self, run: Run) -> bool:
        """True if the follower does nothing more before the leader moves."""
        name = run.policy.name
        return self.gate.has_ended(name) or self.lead.is_waiting(name) or run.supply.is_starved

    def begin_producing(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What goes on beside the clocks, by name."""
        works = {name: produce() for name, produce in self.producers.items()}
        return works | {"saves that are asked for": self._serve_save_requests()}

    async def _serve_save_requests(self) -> None:
        """Also while the leader waits for data, maybe for long: it can not do so itself then."""
        run = self.leader
        while not self.ended.is_set():
            await asyncio.sleep(self.poll_s)
            may_save = run.step > 0 and steps.is_waiting(run) and run.saves.is_idle
            if may_save and run.save_request.claim():
                async with self.gate.exclusive():
                    await steps.save(run, run.step)

    @property
    def followers(self) -> dict[str, Run]:
        return {run.policy.name: run for run in self.leader.others}

    @property
    def runs(self) -> Iterator[Run]:
        """Followers first."""
        yield from self.leader.others
        yield self.leader
