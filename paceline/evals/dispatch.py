"""When evals run and what waits for them: never fatal, and off the critical path where possible.

Without snapshots the engines of training answer, so `dispatch` waits for the eval. With them, a
point is measured on a copy of the weights while training goes on:

    dispatch: settle what has ended -> make room, or skip -> take a snapshot -> start -> return
    drain:    settle everything, by a deadline
    aclose:   stop everything; on every way out

Each snapshot is given back exactly once, when its point has settled. A point that could not be
measured is settled as skipped, with the reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from paceline.deadline import bounded, reason_of, result_of, stop
from paceline.evals.run import EvalResult
from paceline.evals_settings import EvalsConfig

S = TypeVar("S")

logger = logging.getLogger(__name__)

SKIPPED_BUSY = "busy"


class Snapshots(Protocol[S]):
    """Copies of the weights that stay as they are while training goes on."""

    async def take(self, step: int) -> S:
        """Copy the weights that are served now."""

    async def retire(self, snapshot: S) -> None:
        """Free the copy."""


Evaluate = Callable[[int, int, S | None], Coroutine[Any, Any, list[EvalResult]]]
"""(step, version, snapshot) -> a result per set; without snapshot, of the weights served now."""


@dataclass(slots=True)
class _Point(Generic[S]):
    step: int
    version: int
    snapshot: S
    task: asyncio.Task[list[EvalResult]]
    is_retired: bool = False


class EvalDispatcher(Generic[S]):
    """Starts evals of one policy and hands their results back, each exactly once."""

    def __init__(
        self, config: EvalsConfig, evaluate: Evaluate[S], snapshots: Snapshots[S] | None = None
    ) -> None:
        """snapshots: None measures the weights that are served, and training waits."""
        self._config = config
        self._evaluate = evaluate
        self._snapshots = snapshots
        self._points: list[_Point[S]] = []

    @property
    def num_in_flight(self) -> int:
        return len(self._points)

    async def dispatch(self, step: int, version: int, *, force: bool = False) -> list[EvalResult]:
        """Measure the weights of this step. Returns what has settled since the last call.

        force: never skip because others are running (the last step of a run).
        """
        if self._snapshots is None:
            return await self._measure_now(step, version)
        settled = await self._settle(self._ended())
        if self.num_in_flight >= self._config.max_in_flight:
            if self._config.on_busy == "skip" and not force:
                return settled + self._skipped(step, version, SKIPPED_BUSY)
            settled += await self._make_room()
        try:
            snapshot = await bounded(self._snapshots.take(step), self._config.timeout_s)
        except Exception as exc:
            return settled + self._skipped(step, version, f"snapshot failed: {reason_of(exc)}")
        task = asyncio.ensure_future(self._evaluate(step, version, snapshot))
        self._points.append(_Point(step, version, snapshot, task))
        return settled

    async def drain(self, deadline_s: float | None = None) -> list[EvalResult]:
        """Wait for all points, and skip those that have not ended after `deadline_s` seconds
        (default: what a point may take)."""
        points = list(self._points)
        if points:
            limit_s = self._point_limit_s if deadline_s is None else deadline_s
            await asyncio.wait([point.task for point in points], timeout=limit_s)
            await stop(*(point.task for point in points))
        return await self._settle(points)

    async def aclose(self) -> None:
        """Stop all points and give their snapshots back. Idempotent."""
        points, self._points = self._points, []
        try:
            await stop(*(point.task for point in points))
        finally:
            for point in points:
                await self._retire(point)

    async def _measure_now(self, step: int, version: int) -> list[EvalResult]:
        try:
            return await bounded(self._evaluate(step, version, None), self._point_limit_s)
        except Exception as exc:
            return self._skipped(step, version, reason_of(exc))

    async def _make_room(self) -> list[EvalResult]:
        """Wait until a point has ended; if none does in its time, the oldest is stopped."""
        done, _ = await asyncio.wait(
            [point.task for point in self._points],
            timeout=self._point_limit_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if done:
            return await self._settle(self._ended())
        await stop(self._points[0].task)
        return await self._settle(self._points[:1])

    def _ended(self) -> list[_Point[S]]:
        return [point for point in self._points if point.task.done()]

    async def _settle(self, points: Sequence[_Point[S]]) -> list[EvalResult]:
        """Results of points that have ended or been stopped, oldest first; frees their copies."""
        settled: list[EvalResult] = []
        for point in points:
            try:
                settled += result_of(point.task)
            except Exception as exc:
                settled += self._skipped(point.step, point.version, reason_of(exc))
            await self._retire(point)
            self._points.remove(point)
        return settled

    async def _retire(self, point: _Point[S]) -> None:
        if self._snapshots is None or point.is_retired:
            return
        point.is_retired = True
        try:
            await bounded(self._snapshots.retire(point.snapshot), self._config.timeout_s)
        except Exception as exc:
            logger.warning("the snapshot of step %d was not freed: %s", point.step, reason_of(exc))

    def _skipped(self, step: int, version: int, reason: str) -> list[EvalResult]:
        return [EvalResult(s.name, step, version, skipped=reason) for s in self._config.sets]

    @property
    def _point_limit_s(self) -> float:
        """Seconds one point may take: each set its time, and one time more to settle."""
        return self._config.timeout_s * (len(self._config.sets) + 1)
