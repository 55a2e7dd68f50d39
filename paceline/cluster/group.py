"""Calling all ranks of a group together: whatever becomes of a call, every rank has settled.

A rank that failed or died may leave the others waiting for it for ever. So from the first failure
on the rest has a limited time to settle; what has not settled then is ended, and the group with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from paceline.cluster import wire
from paceline.cluster.failures import error_of
from paceline.cluster.members import Limits, Member, Payload
from paceline.cluster.objects import Kept, encode
from paceline.cluster.worker import Answer, Start
from paceline.deadline import reason_of, stop
from paceline.errors import DeadlineError, PacelineError, WorkerError

logger = logging.getLogger(__name__)

SILENT = "\nIt wrote nothing."


class Group:
    """A WorkerGroup of members that are there already."""

    def __init__(
        self,
        name: str,
        members: Sequence[Member],
        pack: Callable[[wire.Message, Sequence[Kept]], Payload],
        limits: Limits,
    ) -> None:
        """`pack` gets a message and the kept values in it. It may take long: it is in a thread."""
        self.name = name
        self._members = list(members)
        self._pack = pack
        self._limits = limits
        self._turn = asyncio.Lock()
        self._is_closed = False
        self._broken: str | None = None

    @property
    def size(self) -> int:
        return len(self._members)

    @property
    def is_busy(self) -> bool:
        """A call is under way."""
        return self._turn.locked()

    async def begin(self, starts: Sequence[Start]) -> None:
        """Make the object in each; to be called once, first."""
        async with self._packed("its start", starts, by_value=True) as payloads:
            await self._ask(payloads, "its start", self._limits.start_s)

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """See `WorkerGroup.call`."""
        async with self._packed(method, [(method, arguments)]) as (payload,):
            return await self._ask([payload] * self.size, method, self._limits.call_s)

    async def scatter(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """See `WorkerGroup.scatter`."""
        if len(arguments) != self.size:
            raise ValueError(f"{len(arguments)} sets of arguments for {self.size} ranks")
        async with self._packed(method, [(method, own) for own in arguments]) as payloads:
            return await self._ask(payloads, method, self._limits.call_s)

    async def aclose(self) -> None:
        """End all processes: asked, then terminated, then killed. Idempotent."""
        self._is_closed = True
        try:
            if self._broken is None and not self.is_busy:
                closing = [asyncio.ensure_future(m.close()) for m in self._members]
                if closing:
                    await asyncio.wait(closing, timeout=self._limits.close_s)
                await stop(*closing, grace_s=1.0)
                for task in closing:
                    self._warn_of(task)
        finally:
            await self._end_all()

    @contextlib.asynccontextmanager
    async def _packed(
        self, what: str, values: Sequence[Any], *, by_value: bool = False
    ) -> AsyncIterator[list[Payload]]:
        """Messages of these values. At the end all ranks have settled: their memory goes."""
        payloads: list[Payload] = []
        in_use: list[Kept] = []

        def pack() -> None:
            for value in values:
                message, kept = encode(value, by_value=by_value)
                in_use.extend(kept)
                payloads.append(self._pack(message, kept))

        def close() -> None:
            for payload in payloads:
                payload.close()
            for kept in in_use:
                kept.release()

        packing = asyncio.ensure_future(asyncio.to_thread(pack))
        try:
            try:
                await asyncio.shield(packing)  # ends: when the values are copied
            except Exception as error:
                raise WorkerError(
                    f"an argument of {what} can not be sent to the workers: {reason_of(error)}"
                ) from error
            yield payloads
        finally:
            if packing.done():
                close()
            else:
                packing.add_done_callback(lambda _: close())

    async def _ask(self, payloads: Sequence[Payload], what: str, limit_s: float) -> list[Any]:
        async with self._turn:  # ends: each holder by its own limit
            self._check()
            asked = [
                asyncio.ensure_future(member.ask(payload))
                for member, payload in zip(self._members, payloads, strict=True)
            ]
            try:
                await self._settle(asked, limit_s)
            except asyncio.CancelledError:
                await self._settle_cancelled(asked, what)
                raise
            return await self._results(asked, what, limit_s)

    def _check(self) -> None:
        if self._broken is not None:
            raise WorkerError(f"{self.name} has ended: {self._broken}")
        if self._is_closed:
            raise WorkerError(f"{self.name} was closed")

    async def _settle(self, asked: list[asyncio.Task[Answer]], limit_s: float) -> None:
        """Until all have answered, or the time is up, or the time from the first failure on."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + limit_s
        waiting = set(asked)
        has_failed = False
        while waiting and clock() < deadline:
            done, waiting = await asyncio.wait(
                waiting, timeout=deadline - clock(), return_when=asyncio.FIRST_COMPLETED
            )
            if not has_failed and any(_is_failure(task) for task in done):
                has_failed = True
                deadline = min(deadline, clock() + self._limits.settle_s)

    async def _settle_cancelled(self, asked: list[asyncio.Task[Answer]], what: str) -> None:
        try:
            _, waiting = await asyncio.wait(asked, timeout=self._limits.cancel_s)
        except asyncio.CancelledError:
            waiting = {task for task in asked if not task.done()}
        if waiting or any(_is_lost(task) for task in asked):
            self._broken = f"a call of {what} was cancelled and did not end"
            await self._end_all()
        await stop(*asked, grace_s=1.0)

    async def _results(
        self, asked: list[asyncio.Task[Answer]], what: str, limit_s: float
    ) -> list[Any]:
        waiting = [rank for rank, task in enumerate(asked) if not task.done()]
        failed = [rank for rank, task in enumerate(asked) if task.done() and _is_failure(task)]
        if not waiting and not failed:
            return [task.result().value for task in asked]
        try:
            error = await self._error(asked, failed, waiting, what, limit_s)
            if waiting or any(_is_lost(asked[rank]) for rank in failed):
                self._broken = str(error).splitlines()[0]
        finally:
            if waiting or any(_is_lost(asked[rank]) for rank in failed):
                self._broken = self._broken or f"a call of {what} failed"
                await self._end_all()
            await stop(*asked, grace_s=1.0)
        raise error

    async def _error(
        self,
        asked: list[asyncio.Task[Answer]],
        failed: list[int],
        waiting: list[int],
        what: str,
        limit_s: float,
    ) -> PacelineError:
        """The failure that explains the others: a lost process before an error of a living one."""
        if waiting:
            await self._show_stacks(waiting)
        if not failed:
            ranks = f"rank {waiting[0]}, which was"
            if len(waiting) > 1:
                ranks = f"ranks {', '.join(map(str, waiting))}, which were"
            outputs = [await self._output(rank) for rank in waiting]
            told = next((text for text in outputs if text != SILENT), SILENT)
            return DeadlineError(
                f"{what} of {self.name} took longer than {limit_s:g} s on {ranks} ended{told}"
            )
        failed.sort(key=lambda rank: not _is_lost(asked[rank]))
        errors = [await self._error_of(asked[rank], rank, what) for rank in failed]
        first, *others = errors
        for other in others:
            first.add_note(f"also: {reason_of(other)[:500]}")
        if waiting:
            ranks = ", ".join(map(str, waiting))
            first.add_note(f"rank {ranks} did not end {what} after that, and was ended")
        return first

    async def _error_of(self, task: asyncio.Task[Answer], rank: int, what: str) -> PacelineError:
        where = f"rank {rank} of {self.name}"
        if error := task.exception():
            how, mark, hint = str(error).partition("; ")
            output = await self._output(rank)
            lost = WorkerError(f"{where} {how} during {what}{mark}{hint}{output}")
            lost.__cause__ = error
            return lost
        failure = task.result().failure
        assert failure is not None
        return error_of(failure, where)

    async def _output(self, rank: int) -> str:
        text = await self._members[rank].last_output()
        return f"\nLast output of rank {rank}:\n{text}" if text else SILENT

    async def _show_stacks(self, ranks: list[int]) -> None:
        shown = [asyncio.ensure_future(self._members[rank].show_stacks()) for rank in ranks]
        await asyncio.wait(shown, timeout=5.0)
        await stop(*shown, grace_s=1.0)

    def _warn_of(self, ending: asyncio.Task[None]) -> None:
        if ending.done() and not ending.cancelled() and (error := ending.exception()):
            logger.warning("at the end of %s: %s", self.name, error)

    async def _end_all(self) -> None:
        """Cancelled or not, no process is left behind; `end` of a member has limits of its own."""
        ending = [asyncio.ensure_future(member.end()) for member in self._members]
        cancelled: asyncio.CancelledError | None = None
        while not all(task.done() for task in ending):
            try:
                await asyncio.wait(ending, timeout=60.0)
            except asyncio.CancelledError as error:
                cancelled = error
        for task in ending:
            self._warn_of(task)
        if cancelled is not None:
            raise cancelled


def _is_lost(task: asyncio.Task[Answer]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _is_failure(task: asyncio.Task[Answer]) -> bool:
    return _is_lost(task) or task.result().failure is not None
