"""The gate: one caller works while every member rests, without stopping the data between them.

    member    learn | [ wait for data ............ ] | learn | [] | publish | [ wait for data ...
    leader          learn | exclusive: wait, save  | learn ...
                          '- enters when every member is between brackets or has ended -'

A bracket is a *safe region*: what the member does there changes no weights. Entering one never
waits. Leaving one waits while the gate is *closed*: from the moment somebody asks for it until it
is released.

No deadlock: whoever asks waits only for members outside their regions. A member does all its
waiting for others (data, a partner's step) inside a region, so outside it only does work that ends
by itself. A member that has its data may be kept at the end of its region, but one that still
waits for data is at rest already, and needs nothing for the gate to be granted. So no queue between
the policies, however short, can be part of a circle of waits. A plain barrier counts only members
that have *finished* waiting for data, and does deadlock.

No starvation: a pending request already closes the gate, so members can only come to rest, never
move from region to region past it; the wait is at most the longest stretch of work that was under
way. A release lets every kept member go before the next request is looked at: it has to come back
to a region to count again, so members move between any two requests.

Errors are never kept waiting: a member whose region raises, or that is cancelled, is outside at
once, even of a held gate. It is expected to end. Should it go on after all, it is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import Enum

from paceline.errors import GateError


class _At(Enum):
    WORK = "works"
    REGION = "is in a safe region"
    EXIT = "is kept at the end of a safe region"
    ENDED = "has ended"
    BROKEN_OUT = "has broken out of the held gate"


AT_REST = {_At.REGION, _At.EXIT, _At.ENDED}


@dataclass(eq=False)
class _Member:
    at: _At = _At.WORK
    turn: asyncio.Future[None] | None = None
    """Done when the member, kept at the end of its region, may go."""
    kept_since: float = 0.0
    kept_s: float = 0.0


@dataclass(eq=False)
class _Request:
    by: str | None
    since: float
    turn: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    is_granted: bool = False


class Gate:
    """Lets one caller at a time work while every member is in a safe region or has ended."""

    def __init__(
        self,
        members: Sequence[str],
        *,
        deadline_s: float | None,
        report: Callable[[], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """members: names of all who have to come to rest; with none the gate is always open.

        deadline_s: seconds that a request may wait, the turns of earlier ones included; None for no
        limit. report: what every policy is doing, for the message of an error.
        """
        self._members = {name: _Member() for name in members}
        self.deadline_s = deadline_s
        self._report = report
        self._clock = clock
        self._requests: deque[_Request] = deque()
        """In the order they came; only the first is ever granted, and stays until its release."""
        self._failure: Exception | None = None
        self._waited_s = 0.0

    @property
    def is_held(self) -> bool:
        return bool(self._requests) and self._requests[0].is_granted

    @property
    def waited_s(self) -> float:
        """Seconds that requests have waited so far, added up over the gate's life."""
        now = self._clock()
        return self._waited_s + sum(now - r.since for r in self._requests if not r.is_granted)

    def kept_s(self, member: str) -> float:
        """Seconds that a member was kept at the ends of its regions, over the gate's life."""
        place = self._member(member)
        since = self._clock() - place.kept_since if place.at is _At.EXIT else 0.0
        return place.kept_s + since

    def has_ended(self, member: str) -> bool:
        """True if the member has left for good."""
        return self._member(member).at is _At.ENDED

    def describe(self) -> str:
        """Where every member is, for people."""
        return ", ".join(f"{name!r} {place.at.value}" for name, place in self._members.items())

    @asynccontextmanager
    async def safe_region(self, member: str) -> AsyncIterator[None]:
        """A stretch in which the member changes no weights. Only its end may wait.

        An empty one is a point where the member can be kept. Raises what the gate has failed with.
        """
        self._enter(member)
        try:
            yield
        except BaseException:
            self._break_out(member)
            raise
        await self._exit(member)

    @asynccontextmanager
    async def exclusive(
        self, *, by: str | None = None, limit_s: float | None = None
    ) -> AsyncIterator[None]:
        """Hold the gate: no member leaves its region until the end of the block.

        by: the member that asks, if it is one; it rests as long as it asks and holds.
        limit_s: seconds that the block may take. Raises GateError if the members do not come to
        rest in time or the block takes longer, and what the gate has failed with.
        """
        request = await self._admitted(by)
        try:
            async with asyncio.timeout(limit_s) as limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise self._error(f"the gate was held for more than {limit_s:g} s") from error
        finally:
            self._release(request)

    @contextmanager
    def membership(self, member: str) -> Iterator[None]:
        """The life of a member. At its normal end nobody waits for it any more.

        If it fails, so does the gate: its weights may be half trained, and must not be saved.
        """
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise
        except BaseException:
            self.fail(GateError(f"policy {member!r} was stopped before its end"))
            raise
        self.leave(member)

    def leave(self, member: str) -> None:
        """The member has ended for good, its weights whole: do not wait for it any more."""
        place = self._member(member)
        self._let_go(place)
        place.at = _At.ENDED
        self._grant()

    def fail(self, error: Exception) -> None:
        """Make everybody who waits here raise this error, now and ever after; the first one counts.

        Who holds the gate goes on to the end of its block.
        """
        if self._failure is not None:
            return
        self._failure = error
        for place in self._members.values():
            self._let_go(place)
        for request in self._requests:
            if not request.turn.done():
                request.turn.set_result(None)

    # Members

    def _enter(self, member: str) -> None:
        place = self._member(member)
        self._raise_failure()
        if place.at is not _At.WORK:
            raise GateError(f"policy {member!r} can not enter a safe region: it {place.at.value}")
        place.at = _At.REGION
        self._grant()

    async def _exit(self, member: str) -> None:
        place = self._member(member)
        if self._failure is None and self._requests and place.at is _At.REGION:
            place.at = _At.EXIT
            place.kept_since = self._clock()
            place.turn = asyncio.get_running_loop().create_future()
            try:
                # ends: at the release of the gate, whose holder may have a limit, or by `fail`
                await place.turn
            except BaseException:
                self._break_out(member)
                raise
        elif place.at is _At.REGION:
            place.at = _At.WORK
        self._raise_failure()

    def _break_out(self, member: str) -> None:
        place = self._member(member)
        if place.at in (_At.REGION, _At.EXIT):
            self._let_go(place)
            place.at = _At.BROKEN_OUT if self.is_held else _At.WORK

    def _let_go(self, place: _Member) -> None:
        if place.at is not _At.EXIT:
            return
        place.at = _At.WORK
        place.kept_s += self._clock() - place.kept_since
        if place.turn is not None and not place.turn.done():
            place.turn.set_result(None)

    # Requests

    async def _admitted(self, by: str | None) -> _Request:
        """A request that was granted; without a wait if everybody rests already."""
        self._raise_failure()
        if by is not None:
            self._enter(by)
        request = _Request(by, self._clock())
        self._requests.append(request)
        self._grant()
        try:
            if not request.is_granted:
                await self._turn_of(request)
                self._raise_failure()
        except BaseException:
            self._release(request)
            raise
        return request

    async def _turn_of(self, request: _Request) -> None:
        try:
            async with asyncio.timeout(self.deadline_s):
                await request.turn
        except TimeoutError as error:
            if not request.is_granted:
                raise self._overdue(request) from error

    def _grant(self) -> None:
        """Give the gate to the first request, if everybody rests and the gate works."""
        if not self._requests or self.is_held or self._failure is not None:
            return
        if all(place.at in AT_REST for place in self._members.values()):
            first = self._requests[0]
            first.is_granted = True
            self._waited_s += self._clock() - first.since
            if not first.turn.done():
                first.turn.set_result(None)

    def _release(self, request: _Request) -> None:
        """The request is over: it was served, or whoever made it has given up."""
        if not request.is_granted:
            self._waited_s += self._clock() - request.since
        self._requests.remove(request)
        if request.is_granted or not self._requests:
            for place in self._members.values():
                self._let_go(place)
        if request.by is not None:
            self._break_out(request.by)
        self._grant()

    # Errors

    def _member(self, name: str) -> _Member:
        if name not in self._members:
            known = ", ".join(map(repr, self._members)) or "nobody"
            raise GateError(f"{name!r} is not a member of the gate, which has {known}")
        return self._members[name]

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _overdue(self, request: _Request) -> GateError:
        names = [n for n, p in self._members.items() if p.at not in AT_REST]
        if self._requests[0] is not request:
            what = "for an earlier request to be done"
        else:
            what = f"for {', '.join(map(repr, names))} to come to a point of rest"
        text = f"waited {self.deadline_s:g} s {what}; if a step takes that long, allow more time"
        return self._error(text)

    def _error(self, text: str) -> GateError:
        doings = self._report()
        return GateError(f"{text}. At the gate: {self.describe()}.\n{doings}".rstrip())
