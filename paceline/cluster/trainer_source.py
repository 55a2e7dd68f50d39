"""The sender's end of a publish whose tensors are spread over a group of workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.cluster.base import WorkerGroup
from paceline.errors import PacelineError
from paceline.weights.base import Meeting, Parcel, WeightPlan

if TYPE_CHECKING:
    from torch import Tensor

LOOK_S = 0.5
"""How long a rank waits for receivers before it answers that they are not done."""


class GroupSource:
    """Of all publishes of a trainer; one receiver at a time."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._turn = asyncio.Lock()

    def of(self, plan: WeightPlan) -> PlanSource:
        """Of one publish."""
        return PlanSource(self._group, plan, self._turn)


class PlanSource:
    """Implements `paceline.weights.base.WeightSource`."""

    def __init__(self, group: WorkerGroup, plan: WeightPlan, turn: asyncio.Lock) -> None:
        self._group = group
        self._plan = plan
        self._turn = turn

    async def parcels(self) -> AsyncIterator[Parcel]:
        """All tensors, each once. A parcel is valid until the next one is asked for."""
        plan = self._plan
        # ends: with the turn of another receiver, which `publish` gives a deadline
        async with self._turn:
            await self._group.call(
                "open_parcels",
                plan.version,
                plan.transport,
                plan.bucket_bytes,
                plan.folder,
                plan.dtype,
            )
            try:
                while (parcel := _merged(await self._group.call("next_parcel"))) is not None:
                    yield parcel
            finally:
                await self._group.call("close_parcels")

    async def meeting_point(self) -> tuple[str, int]:
        """Address and a free port of rank 0, for a new meeting."""
        points: list[tuple[str, int]] = await self._group.call("meeting_point")
        return points[0]

    async def meet(self, meeting: Meeting) -> None:
        """Join as rank 0; returns when all have."""
        await self._group.call("begin_meet", meeting)
        await self._wait_for_receivers()

    async def broadcast(self, parcel: Parcel) -> None:
        """Send the newest parcel to the group. Cancelled, it ends, and so does the group."""
        await self._group.call("begin_broadcast")
        await self._wait_for_receivers()

    async def checksums(self) -> Mapping[str, str]:
        """Name of each tensor -> hash of what the trainer holds."""
        found: list[dict[str, str]] = await self._group.call("checksums")
        return found[0]

    async def numbers(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Copies of some of the tensors, on the host."""
        found: list[dict[str, Tensor]] = await self._group.call("numbers", tuple(names))
        return found[0]

    async def _wait_for_receivers(self) -> None:
        looking: asyncio.Task[list[bool]] | None = None
        try:
            while looking is None or not all(looking.result()):
                looking = asyncio.ensure_future(self._group.call("has_sent", LOOK_S))
                await asyncio.shield(looking)  # ends: after LOOK_S, or with a call's time limit
        except asyncio.CancelledError:
            await self._give_up(looking)
            raise

    async def _give_up(self, looking: asyncio.Task[list[bool]] | None) -> None:
        """Let the last look end: a call that is cancelled may cost the workers their lives."""
        if looking is not None:
            await asyncio.wait([looking], timeout=10 * LOOK_S)
        with suppress(PacelineError):  # the sending itself fails now, which is what was wanted
            await self._group.call("give_up")
            await self._group.call("has_sent", 10 * LOOK_S)


def _merged(parts: list[Parcel | None]) -> Parcel | None:
    """One parcel with the handles of all ranks. The last one came where none has any more."""
    first = parts[0]
    if first is None:
        return None
    handles = tuple(text for part in parts if part is not None for text in part.handles)
    return replace(first, handles=handles)
