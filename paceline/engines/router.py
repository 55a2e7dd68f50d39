"""An engine of several replicas: requests are spread over them, everything else is done on all.

generate -> gate (open unless paused or asleep) -> Fleet.choose -> replica, or another one
                                                -> or a Front, which chooses itself
receive  -> Delivery: one pass over the parcels, each to all replicas at the same time
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from typing import Literal, TypeVar

from paceline.engines.base import Completion, CutSignal, Part, Request
from paceline.engines.delivery import Delivery
from paceline.engines.fleet import Fleet, Member
from paceline.engines.http import FIRST_PAUSE_S, LostServerError
from paceline.engines.readback import differences
from paceline.engines.replica import Front, OwnCheck, Replica, Supplier, WeightIntake
from paceline.errors import EngineError, WeightError
from paceline.weights.base import PauseMode, Transport, WeightPlan
from paceline.weights.settings import EXACT, WeightCheckConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_NAMED = 5
WATCH_S, WATCH_EACH_S = 2.0, 0.02
"""Seconds between two looks at a replica: of few, and for each of many."""
TRANSPORTS: tuple[Transport, ...] = ("handles", "collective", "disk")


class RoutedEngine:
    """Implements `paceline.engines.base.Engine` over replicas. `open` before use."""

    def __init__(
        self,
        suppliers: Sequence[Supplier],
        *,
        policy: str,
        version: int = 0,
        retries: int = 2,
        backend: Literal["nccl", "gloo"] = "gloo",
        return_timeout_s: float = 900.0,
        update_timeout_s: float = 600.0,
        watch_s: float | None = None,
        front: Front | None = None,
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """version: of the weights that replicas start with. retries: further attempts of a request
        whose replica was lost. backend: of broadcasts. return_timeout_s: how long a request waits
        where all replicas are lost and one may come back. watch_s: between two looks at each
        replica. front: chooses among replicas that serve. close: called when all is over."""
        self.policy = policy
        self._retries, self._return_timeout_s, self._close = retries, return_timeout_s, close
        self._delivery = Delivery(backend=backend, timeout_s=update_timeout_s)
        self._fleet = Fleet(
            suppliers,
            policy=policy,
            version=version,
            admit=self._admit,
            may_start=lambda: not self._asleep,
            changed=self._notify,
            watch_s=watch_s or max(WATCH_S, WATCH_EACH_S * len(suppliers)),
        )
        self._front, self._num_at_front = front, 0
        self._held: Literal["drain", "freeze"] | None = None
        """`drain`: no request is sent; `freeze`: those that were sent rest, too."""
        self._asleep: frozenset[Part] = frozenset()
        self._lacks_weights = False
        self._is_closed = False
        self._waiters: set[asyncio.Future[None]] = set()

    async def open(self) -> None:
        """Start all replicas. Raises EngineError with the reason of the first that fails."""
        await self._fleet.open()
        if self._front is not None:
            await self._front.serve(self._fleet.serving)

    @property
    def version(self) -> int:
        """Version of the weights that the next token is made with."""
        return self._fleet.version

    @property
    def num_running(self) -> int:
        """Requests that replicas have open."""
        return self._fleet.load + self._num_at_front

    @property
    def addresses(self) -> list[str]:
        """Where the replicas are that are up."""
        return [member.alive.name for member in self._fleet.up()]

    @property
    def num_serving(self) -> int:
        """Replicas that answer and hold the engine's weights."""
        return sum(member.serves for member in self._fleet.members)

    async def generate(self, request: Request) -> Completion:
        if (front := self._front) is not None:
            made = await self._ask(
                "",
                request.cut,
                lambda _: self._ask_front(front, request),
                self._lost_behind_front,
            )
        else:
            made = await self._ask(
                request.group,
                request.cut,
                lambda member: self._ask_one(member, lambda r: r.generate(request)),
                self._fleet.failed,
            )
        return Completion([], [], [], "length") if made is None else made

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        found = await self._ask(
            "",
            None,
            lambda member: self._ask_one(member, lambda r: r.score(tokens, temperature)),
            self._fleet.failed,
        )
        assert found is not None  # only a cut leaves it out
        return found

    async def receive(self, plan: WeightPlan) -> None:
        self._refuse_if_closed()
        if plan.policy != self.policy:
            raise WeightError(
                f"weights of policy {plan.policy!r} were sent to the engine of {self.policy!r}"
            )
        if plan.transport not in TRANSPORTS:
            raise WeightError(
                f"the engine of {self.policy!r} runs in processes of its own, and was sent weights "
                f"by transport {plan.transport!r}: it takes {', '.join(TRANSPORTS)}"
            )
        if "weights" in self._asleep:
            raise WeightError("the engine's weights are asleep: wake them before a publish")
        members = {member.alive.weights: member for member in self._fleet.up()}
        if not members:
            await self._fleet.look_at_lost()
            raise WeightError(f"no replica is there to take weights: {self._fleet.why_none()}")

        def lost(weights: WeightIntake, error: EngineError) -> None:
            self._fleet.lost(members[weights], error)

        holds_former = all(member.is_current for member in members.values())
        try:
            there = await self._delivery.bring(plan, list(members), lost, holds_former=holds_former)
        except WeightError as error:
            if self._fleet.up():
                raise
            await self._fleet.look_at_lost()
            raise WeightError(f"no replica is left: {self._fleet.why_none()}") from error
        self._fleet.holds(plan.version, there)
        self._lacks_weights = False
        await self._settle()

    async def reset(self, plan: WeightPlan, check: WeightCheckConfig) -> None:
        """Make the weights of all replicas worthless until new ones come; see `weights.check`."""
        self._refuse_if_closed()
        members = self._fleet.up()
        for member in members:
            if not isinstance(member.alive.weights, OwnCheck):
                raise WeightError(
                    f"{member.supplier.name} has no way to reset its weights; set "
                    "weight_check.reset = false"
                )
        self._lacks_weights = True
        for member in members:
            member.is_current = False
        await self._on_all(lambda replica: _reset(replica, plan.version, check))

    async def holds(self, plan: WeightPlan, check: WeightCheckConfig = EXACT) -> list[str]:
        """In what replicas differ from what the sender has, in words; see `weights.check`."""
        if plan.source is None:
            raise WeightError("the plan carries no source to compare with")
        sent = await plan.source.checksums()
        told: list[str] = []
        for member in self._fleet.up():
            weights = member.alive.weights
            wrong = await weights.compare(check) if isinstance(weights, OwnCheck) else None
            if wrong is None:
                wrong = await differences(
                    weights.read, sent, self._delivery.tensors, plan.source.numbers, check
                )
            if wrong:
                told.append(
                    f"{member.supplier.name}: {len(wrong)} of {len(sent)} tensors differ or are "
                    f"missing: {', '.join(wrong[:MOST_NAMED])}"
                )
        return told

    async def pause(self, mode: PauseMode) -> None:
        """Stop making tokens. A second pause only stops more; `resume` ends both.

        Requests that arrive meanwhile, and scores, wait until `resume`.
        """
        self._refuse_if_closed()
        if mode == "finish" and self._held == "freeze":
            return
        self._held = "drain" if mode == "finish" else "freeze"
        if mode == "finish":
            await self._drained()
        await self._on_all(lambda replica: replica.pause(mode))

    async def resume(self) -> None:
        self._refuse_if_closed()
        self._held = None
        await self._settle()

    async def sleep(self, parts: frozenset[Part]) -> None:
        """Free the parts. Running requests must be paused first; they are computed anew when they
        go on."""
        self._refuse_if_closed()
        if self.num_running and self._held != "freeze":
            raise EngineError("the engine can not sleep with requests open: pause it first")
        new = parts - self._asleep
        self._asleep |= parts
        self._lacks_weights |= "weights" in new
        if new and self.num_running:
            await self._on_all(lambda replica: replica.pause("recompute"))
        await self._on_all(lambda replica: replica.sleep(new))

    async def wake(self, parts: frozenset[Part]) -> None:
        self._refuse_if_closed()
        back = parts & self._asleep
        await self._on_all(lambda replica: replica.wake(back))
        self._asleep -= parts
        await self._settle()

    async def aclose(self) -> None:
        """Fail what waits, and end the servers that were started. Idempotent."""
        self._is_closed = True
        self._notify()
        if self._front is not None:
            await self._front.aclose()
        await self._fleet.aclose()
        close, self._close = self._close, None
        if close is not None:
            await close()

    @property
    def _rests(self) -> bool:
        return self._held is not None or bool(self._asleep) or self._lacks_weights

    async def _ask(
        self,
        group: str,
        cut: CutSignal | None,
        call: Callable[[Member], Awaitable[T | None]],
        failed: Callable[[Member, LostServerError], Awaitable[None]],
    ) -> T | None:
        """What a replica answers; None if the request was cut before one was asked.

        call: None if it could not be asked now. failed: called when an answer is lost; finds out
        who does not serve any more.
        """
        tried: list[Member] = []
        pause_s = FIRST_PAUSE_S
        while True:
            self._refuse_if_unusable()
            if cut is not None and cut.is_set:
                return None
            if self._rests:
                await self._change(cut)
                continue
            member = self._fleet.choose(group, tried)
            if member is None:
                await self._replica_back(cut)
                continue
            try:
                if (answer := await call(member)) is not None:
                    return answer
            except LostServerError as error:
                await failed(member, error)
                if len(tried) >= self._retries:
                    times = f"{len(tried) + 1} attempts (engine.retries = {self._retries})"
                    raise EngineError(f"a request was lost in {times}; the last: {error}") from None
                if self.num_serving:
                    logger.warning("%s; asking another replica", error)
                if member in tried or self.num_serving == 1:
                    await asyncio.sleep(pause_s)
                    pause_s *= 2
                tried.append(member)

    async def _ask_one(self, member: Member, call: Callable[[Replica], Awaitable[T]]) -> T:
        self._fleet.took(member, 1)
        try:
            answer = await call(member.alive)
        finally:
            self._fleet.took(member, -1)
            if not self.num_running:
                self._notify()
        member.failures, member.served, member.is_heard = 0, member.served + 1, True
        return answer

    async def _ask_front(self, front: Front, request: Request) -> Completion | None:
        await front.serve(self._fleet.serving)
        if self._rests or not self.num_serving:
            return None  # since it was called
        self._num_at_front += 1
        try:
            return await front.generate(request, self.version)
        finally:
            self._num_at_front -= 1
            if not self.num_running:
                self._notify()

    async def _lost_behind_front(self, _: Member, error: LostServerError) -> None:
        if not self._rests:  # else replicas may be in the middle of a publish
            await self._fleet.find_lost()

    async def _replica_back(self, cut: CutSignal | None) -> None:
        """Wait for a replica that may serve again, or say that none will."""
        if not self._fleet.may_return():
            await self._fleet.look_at_lost()
            self._refuse_if_closed()
            if self.num_serving:
                return
            told = f"no replica of policy {self.policy!r} serves: {self._fleet.why_none()}"
            raise EngineError(told) from EngineError(told)
        try:
            async with asyncio.timeout(self._return_timeout_s):
                await self._change(cut)
        except TimeoutError:
            told = (
                f"no replica of policy {self.policy!r} came back within "
                f"{self._return_timeout_s:g} s: {self._fleet.why_none()}"
            )
            raise EngineError(told) from EngineError(told)

    async def _drained(self) -> None:
        while self.num_running:
            await self._change(None)
            self._refuse_if_closed()
            if self._held is None:
                raise EngineError("the engine was resumed before it had come to rest")

    async def _change(self, cut: CutSignal | None) -> None:
        """Wait until something has happened that may let a request go on."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(future)
        try:
            with nullcontext() if cut is None else cut.listening(lambda: _settle(future)):
                await future  # ends: `_notify`: a change of state or replicas, or `aclose`
        finally:
            self._waiters.discard(future)

    def _notify(self) -> None:
        for future in self._waiters:
            _settle(future)

    async def _settle(self) -> None:
        """Go on if nothing is against it any more."""
        if not self._rests:
            await self._on_all(lambda replica: replica.resume())
        self._notify()

    async def _admit(self, replica: Replica) -> None:
        if self._held is not None:
            await replica.pause("recompute")
        else:
            await replica.resume()

    async def _on_all(self, call: Callable[[Replica], Awaitable[None]]) -> None:
        """Call all that are up; those that are lost are out, and another error is raised."""
        members = self._fleet.up()
        # ends: each call by the time limits of its replica
        results = await asyncio.gather(
            *(call(member.alive) for member in members), return_exceptions=True
        )
        for member, error in zip(members, results, strict=True):
            if isinstance(error, LostServerError):
                self._fleet.lost(member, error)
            elif error is not None:
                raise error

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed")

    def _refuse_if_unusable(self) -> None:
        self._refuse_if_closed()
        if self._asleep:
            raise EngineError(
                f"the engine is asleep ({', '.join(sorted(self._asleep))}): wake it first"
            )
        if self._lacks_weights:
            raise EngineError(
                "the engine's weights were dropped while it slept, or reset, and none were "
                "received since: publish first"
            )


async def _reset(replica: Replica, version: int, check: WeightCheckConfig) -> None:
    assert isinstance(replica.weights, OwnCheck)  # was looked at before
    await replica.weights.reset(version, check)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
