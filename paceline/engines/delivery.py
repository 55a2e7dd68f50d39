"""New weights on their way to all replicas of an engine: one pass over the parcels of a publish."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Literal

from paceline.deadline import stop
from paceline.engines.http import LostServerError
from paceline.engines.replica import WeightIntake
from paceline.errors import EngineError, WeightError
from paceline.weights.base import Meeting, Parcel, TensorInfo, WeightPlan, WeightSource

Lost = Callable[[WeightIntake, EngineError], None]


class Delivery:
    """Brings plans to replicas, and remembers the meeting that it has with them and the trainer."""

    def __init__(self, *, backend: Literal["nccl", "gloo"], timeout_s: float) -> None:
        """timeout_s: for one parcel, and for a meeting to come together."""
        self._backend, self._timeout_s = backend, timeout_s
        self._met: tuple[Meeting, tuple[WeightIntake, ...]] | None = None
        self.tensors: dict[str, TensorInfo] = {}
        """What the newest plan brought."""

    async def bring(
        self,
        plan: WeightPlan,
        replicas: Sequence[WeightIntake],
        lost: Lost,
        *,
        holds_former: bool,
    ) -> list[WeightIntake]:
        """Returns those that hold the plan's weights now.

        holds_former: whether all replicas hold the weights of the last publish: changes will do.

        A replica that is lost on the way is reported, and the others go on; a broadcast does not
        go on without a member. Raises WeightError if a replica refused, or none is left.
        """
        if plan.source is None:
            raise WeightError(
                f"policy {plan.policy!r}: the plan of version {plan.version} has no source to take "
                "weights from; let the trainer fill it (`Trainer.send`) before a receiver"
            )
        there = list(replicas)
        if plan.transport == "collective":
            await self._meet(plan, there, lost)
        there = await _on_all(there, lambda r: r.begin(plan.transport), lost)
        self.tensors = {}
        parcels = plan.source.parcels()
        try:
            async for parcel in parcels:
                if not holds_former:
                    parcel = replace(parcel, changed=None)
                self.tensors |= {info.name: info for info in parcel.tensors}
                there = await self._hand_on(plan, plan.source, parcel, there, lost)
        except BaseException:
            self._met = None  # who knows where its members are
            raise
        finally:
            # At once, not when the generator is collected: the sender waits for its end.
            if isinstance(parcels, AsyncGenerator):
                await parcels.aclose()
        return await _on_all(there, lambda r: r.end(plan.version), lost)

    async def _hand_on(
        self,
        plan: WeightPlan,
        source: WeightSource,
        parcel: Parcel,
        replicas: list[WeightIntake],
        lost: Lost,
    ) -> list[WeightIntake]:
        """Returns the replicas that have the parcel."""
        if plan.transport != "collective":
            return await _on_all(replicas, lambda r: r.take(parcel, plan.transport), lost)
        takes = [_named(r, r.take(parcel, "collective"), lost) for r in replicas]
        await self._together("a broadcast", source.broadcast(parcel), *takes)
        return replicas

    async def _meet(self, plan: WeightPlan, replicas: Sequence[WeightIntake], lost: Lost) -> None:
        """Bring sender and replicas together, unless they are."""
        if self._met is not None and self._met[1] == tuple(replicas):
            return
        self._met = None
        assert plan.source is not None
        async with asyncio.timeout(self._timeout_s):
            address, port = await plan.source.meeting_point()
        size = 1 + sum(replica.num_devices for replica in replicas)
        name = f"paceline-{plan.policy}-{uuid.uuid4().hex[:8]}"
        meeting = Meeting(name, address, port, size, self._backend)
        joining, rank = [], 1
        for replica in replicas:
            joining.append(_named(replica, replica.join(meeting, rank), lost))
            rank += replica.num_devices
        await self._together("the meeting", plan.source.meet(meeting), *joining)
        self._met = (meeting, tuple(replicas))

    async def _together(self, what: str, *works: Coroutine[Any, Any, None]) -> None:
        """Each waits for the others, so that the first failure ends all."""
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            done, waiting = await asyncio.wait(
                tasks, timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                if (error := task.exception()) is not None:
                    if isinstance(error, WeightError):
                        raise error
                    raise WeightError(f"{what} failed: {error}") from error
            if waiting:
                raise WeightError(
                    f"{what} did not come to an end within {self._timeout_s:g} s: {len(waiting)} "
                    f"of {len(tasks)} members still wait"
                )
        finally:
            await stop(*tasks)


async def _named(replica: WeightIntake, work: Awaitable[None], lost: Lost) -> None:
    try:
        await work  # ends: by the time limits of its replica
    except LostServerError as error:
        lost(replica, error)
        raise


async def _on_all(
    replicas: Sequence[WeightIntake], call: Callable[[WeightIntake], Awaitable[None]], lost: Lost
) -> list[WeightIntake]:
    """Those on which it went well. All are waited for."""
    # ends: each call by the time limits of its replica
    results = await asyncio.gather(*map(call, replicas), return_exceptions=True)
    there: list[WeightIntake] = []
    last: LostServerError | None = None
    for replica, error in zip(replicas, results, strict=True):
        if isinstance(error, LostServerError):
            lost(replica, error)
            last = error
        elif error is not None:
            raise error
        else:
            there.append(replica)
    if not there:
        raise WeightError(f"no replica is left: {last}") from last
    return there
