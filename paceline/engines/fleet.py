"""The replicas of one engine: which of them serve, and what becomes of those that are lost.

    lost --(it answers again, and says that it holds the engine's version)--> serves
         --(its process has ended: it is started again)--> holds the weights of the model's folder
    holds the engine's version --> serves        holds another --> waits for the next publish

A replica that holds other weights than the engine never serves.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from heapq import heapify, heappop, heappush

from paceline.deadline import reason_of, stop
from paceline.engines.http import LostServerError
from paceline.engines.lag import Lag
from paceline.engines.replica import Replica, Supplier, WeightIntake
from paceline.errors import EngineError

logger = logging.getLogger(__name__)

MOST_HOMES = 65_536
"""Groups whose replica is remembered."""
SLACK, SLACK_SHARE = 16, 0.5
"""A group stays where its prefix is as long as that replica has not so many, and so large a share,
more requests open than the idlest."""
FAILURES_IN_A_ROW = 3
"""Requests that a replica loses one after another before it counts as lost."""
STARTS_IN_A_ROW = 3
"""Times that a server is started again, without having served since, before it is given up."""
ENDING_S, LOOK_S = 3.0, 0.1
"""Seconds that a server which was killed may take to be gone; how often it is looked at."""
LOST_S = 60.0
"""Seconds that a server which runs may be silent before it is started again."""
LATE_SHARE = 0.2
"""Where this process's own loop was late by more of a look's time, the look says nothing."""


class Member:
    """A place for a replica, with what happens there."""

    def __init__(self, supplier: Supplier) -> None:
        self.supplier = supplier
        self.replica: Replica | None = None
        self.is_up = False
        """It answers."""
        self.is_current = False
        """It holds the weights of the engine."""
        self.load = 0
        """Requests that it has open."""
        self.order = 0
        """Number of its newest change of load: of equals, the one that rested longest goes."""
        self.served = 0
        self.is_heard = False
        """It has answered since the last look at it."""
        self.failures = 0
        self.starts = 0
        self.error: EngineError | None = None
        """Why it is not up."""
        self.lost_at = 0.0
        self.is_given_up = False

    @property
    def serves(self) -> bool:
        return self.is_up and self.is_current

    @property
    def alive(self) -> Replica:
        """Its replica. Only asked for where it is up."""
        if self.replica is None:
            raise LostServerError(f"{self.supplier.name} has not been started")
        return self.replica


class Fleet:
    """Starts, watches and ends the replicas of an engine.

    admit: called for a replica that came back, before it counts as up: it brings it to the state of
    the others (paused). may_start: whether servers may be started now.
    """

    def __init__(
        self,
        suppliers: Sequence[Supplier],
        *,
        policy: str,
        version: int,
        admit: Callable[[Replica], Awaitable[None]],
        may_start: Callable[[], bool],
        changed: Callable[[], None],
        watch_s: float,
    ) -> None:
        """version: of the weights in the model's folder. changed: called when who serves may have
        changed. watch_s: seconds between two looks at every replica."""
        self.policy = policy
        self.members = [Member(supplier) for supplier in suppliers]
        self.version = self.folder_version = version
        self._admit, self._may_start, self._changed = admit, may_start, changed
        self._watch_s = watch_s
        self.load = 0
        """Requests that all replicas have open."""
        self._loads: list[tuple[int, int, Member]] = []
        """A heap of (load, order, member), with entries that are out of date."""
        self._order = itertools.count(1)
        self._lag = Lag()
        self._finding, self._found_at = asyncio.Lock(), -math.inf
        self._homes: OrderedDict[str, Member] = OrderedDict()
        self._task: asyncio.Task[None] | None = None
        self._returning: dict[Member, asyncio.Task[None]] = {}

    async def open(self) -> None:
        """Start all replicas, side by side. If one can not be started, all are ended."""
        try:
            # ends: each start by the time limit of its supplier
            async with asyncio.TaskGroup() as group:
                for member in self.members:
                    group.create_task(self._start(member))
        except BaseExceptionGroup as failed:
            await self.aclose()
            errors = [e for e in failed.exceptions if not isinstance(e, asyncio.CancelledError)]
            raise (errors or [failed])[0] from None
        except BaseException:
            await self.aclose()
            raise
        self._task = asyncio.create_task(self._watch(), name=f"watch-{self.policy}")

    async def aclose(self) -> None:
        """End all servers that were started. Idempotent."""
        tasks = [*self._returning.values(), *([self._task] if self._task else [])]
        self._task = None
        await stop(*tasks)
        for member in self.members:
            member.is_up = False
        # ends: each stop by the time limits of its supplier
        results = await asyncio.gather(
            *(member.supplier.stop() for member in self.members), return_exceptions=True
        )
        for error in results:
            if error is not None:
                logger.error("a server could not be ended: %s", reason_of(error))

    def up(self) -> list[Member]:
        return [member for member in self.members if member.is_up]

    def serving(self) -> list[Replica]:
        return [member.alive for member in self.members if member.serves]

    def choose(self, group: str, avoid: Collection[Member]) -> Member | None:
        """Where a request goes: to its group's replica, else to the idlest. None if none serves.

        avoid: replicas that lost it before; they are asked again only if no other serves.
        """
        idlest = self._idlest(avoid)
        if idlest is None:
            return None
        chosen = idlest
        home = self._homes.get(group) if group else None
        if home is not None and home.serves and home not in avoid:
            most = idlest.load + max(SLACK, SLACK_SHARE * idlest.load)
            chosen = home if home.load <= most else idlest
        if group:
            self._homes[group] = chosen
            self._homes.move_to_end(group)
            if len(self._homes) > MOST_HOMES:
                self._homes.popitem(last=False)
        return chosen

    def took(self, member: Member, requests: int) -> None:
        """A replica has so many more requests open, or fewer."""
        member.load += requests
        self.load += requests
        member.order = next(self._order)
        heappush(self._loads, (member.load, member.order, member))
        if len(self._loads) > 8 * len(self.members) + 64:
            self._loads = []

    def _idlest(self, avoid: Collection[Member]) -> Member | None:
        if avoid:
            serving = [member for member in self.members if member.serves]
            fresh = [member for member in serving if member not in avoid] or serving
            return min(fresh, key=lambda m: (m.load, m.order), default=None)
        for _ in range(2):
            # Entries that are out of date are dropped when they come up.
            while self._loads:
                _, order, member = self._loads[0]
                if member.serves and order == member.order:
                    return member
                heappop(self._loads)
            for member in self.members:
                member.order = member.order or next(self._order)
            self._loads = [(m.load, m.order, m) for m in self.members if m.serves]
            heapify(self._loads)
        return None

    def lost(self, member: Member, error: EngineError) -> None:
        """A replica can not be counted on until it has been looked at."""
        if member.is_up:
            logger.warning("%s is out: %s", member.supplier.name, error)
            member.is_up, member.error = False, error
            member.lost_at = asyncio.get_running_loop().time()
            self._changed()
            self._bring_back(member)

    async def failed(self, member: Member, error: LostServerError) -> None:
        """A request was lost on it."""
        member.failures += 1
        if error.is_cut_off or member.failures >= FAILURES_IN_A_ROW:
            self.lost(member, error)
        elif (end := await member.supplier.problem()) is not None:
            self.lost(member, EngineError(end))

    async def find_lost(self) -> None:
        """A request was lost, and it is not known where: look at all that are up."""
        lost_at = asyncio.get_running_loop().time()
        async with self._finding:  # ends: by the time limits of the looks
            if self._found_at > lost_at:
                return  # by a look that began after the loss
            self._found_at = asyncio.get_running_loop().time()
            # ends: each look by the time limits of its replica
            await asyncio.gather(*(self._look_closely(member) for member in self.up()))

    async def _look_closely(self, member: Member) -> None:
        if (end := await member.supplier.problem()) is not None:
            self.lost(member, EngineError(end))
            return
        start, version = asyncio.get_running_loop().time(), self.version
        try:
            held = await member.alive.weights.version()
        except EngineError as error:
            if not self._was_late(start, error):
                self.lost(member, error)
            return
        if member.is_current and held != version == self.version:
            # Its owner has started it again, so fast that it seemed to have been there all along.
            self.lost(member, EngineError(f"it holds weights of version {held}"))

    def holds(self, version: int, replicas: Collection[WeightIntake]) -> None:
        """The engine has this version from now on; only these replicas hold it."""
        self.version = version
        for member in self.members:
            member.is_current = member.replica is not None and member.replica.weights in replicas
        self._loads = []

    def may_return(self) -> bool:
        """True if a replica that does not serve now may do so without a publish."""
        return any(
            not member.is_given_up
            and not member.is_up
            and (not member.supplier.is_ours or self.version == self.folder_version)
            for member in self.members
        )

    def why_none(self) -> str:
        """Why no replica serves."""
        return "; ".join(
            f"{member.supplier.name} waits for new weights after a restart"
            if member.is_up
            else f"{member.supplier.name}: {_reason(member)}"
            for member in self.members
        )

    async def look_at_lost(self) -> None:
        """Learn how servers have ended whose connections broke, which says more. One that was
        killed is gone a moment later."""
        clock = asyncio.get_running_loop().time
        until = clock() + ENDING_S
        while clock() < until:
            lost = [m for m in self.members if not m.is_up and m.supplier.is_ours]
            for member in lost:
                _learn(member, await member.supplier.problem())
            if not any(isinstance(member.error, LostServerError) for member in lost):
                return
            await asyncio.sleep(LOOK_S)

    async def _start(self, member: Member) -> None:
        member.starts += 1
        replica = await member.supplier.start(self.folder_version)
        await self._came_up(member, replica)

    async def _came_up(self, member: Member, replica: Replica) -> None:
        await self._admit(replica)
        held = await replica.weights.version()
        member.replica, member.is_up, member.failures = replica, True, 0
        member.is_current = held == self.version
        self._loads = []
        if not member.is_current:
            logger.warning(
                "%s is up with weights of version %s, and waits for those of the next publish "
                "(the engine serves version %d)", member.supplier.name, held, self.version,
            )  # fmt: skip
        self._changed()

    async def _watch(self) -> None:
        """Look at every replica from time to time: at each when its turn is, not at all at once."""
        turns = [
            self._watch_one(member, self._watch_s * number / len(self.members))
            for number, member in enumerate(self.members, start=1)
        ]
        await asyncio.gather(self._lag.measure(), *turns)  # ends: `aclose`

    async def _watch_one(self, member: Member, first_s: float) -> None:
        clock = asyncio.get_running_loop().time
        turn = clock() + first_s
        while True:
            await asyncio.sleep(turn - clock())
            try:
                await self._look(member)
            except Exception as error:
                logger.exception("%s: a look failed: %s", member.supplier.name, reason_of(error))
            # A turn of its own: after a loop that stood still all would look at once.
            turn += self._watch_s * max(1, math.ceil((clock() - turn) / self._watch_s))

    async def _look(self, member: Member) -> None:
        is_heard, member.is_heard = member.is_heard, False
        if not member.is_up:
            self._bring_back(member)
        elif not is_heard:
            if (end := await member.supplier.problem()) is not None:
                self.lost(member, EngineError(end))
                return
            start = asyncio.get_running_loop().time()
            try:
                await member.alive.check()
            except EngineError as error:
                if not (member.is_heard or self._was_late(start, error)):
                    self.lost(member, error)

    def _was_late(self, start: float, error: EngineError) -> bool:
        """Whether the answer may have come in time to a loop that was late itself."""
        is_silent = isinstance(error, LostServerError) and not error.is_cut_off
        return is_silent and self._lag.share_since(start) > LATE_SHARE

    def _bring_back(self, member: Member) -> None:
        if self._task is None or member.is_given_up or member in self._returning:
            return
        task = asyncio.create_task(self._return(member), name=f"return-{member.supplier.name}")
        self._returning[member] = task

        def returned(task: asyncio.Task[None]) -> None:
            self._returning.pop(member, None)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("%s: %s", member.supplier.name, reason_of(error), exc_info=error)

        task.add_done_callback(returned)

    async def _return(self, member: Member) -> None:
        end = await member.supplier.problem()
        _learn(member, end)
        if end is None and member.replica is not None:
            start = asyncio.get_running_loop().time()
            try:
                await member.replica.check()
                await self._came_up(member, member.replica)
                return
            except EngineError as error:
                member.error = error
                if self._was_late(start, error):
                    return
        lost_s = asyncio.get_running_loop().time() - member.lost_at
        is_gone = end is not None or lost_s > LOST_S
        if not (member.supplier.is_ours and is_gone and self._may_start()):
            return
        if member.served:
            member.starts = member.served = 0
        if member.starts >= STARTS_IN_A_ROW:
            member.is_given_up = True
            logger.error("%s is given up: %s", member.supplier.name, member.error)
            self._changed()
            return
        try:
            await self._start(member)
        except EngineError as error:
            member.error = error
            logger.error("%s could not be started again: %s", member.supplier.name, error)


def _learn(member: Member, end: str | None) -> None:
    if end is not None and isinstance(member.error, LostServerError):
        member.error = EngineError(end)


def _reason(member: Member) -> str:
    return str(member.error).removeprefix(f"{member.supplier.name} ")
