"""The looks of a fleet at its replicas, in virtual time: when they come, and what they tell."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest
from drivers.virtual_time import VirtualLoop, run_virtual
from engines.replicas import FakeReplica, FakeSupplier
from engines.routed import request

from paceline.engines.http import LostServerError
from paceline.engines.router import RoutedEngine

WATCH_S, CHECK_S = 20.0, 15.0
Scenario = Callable[[RoutedEngine, list[FakeSupplier]], Awaitable[None]]


def watched(scenario: Scenario, count: int, *, is_ours: bool = False, seed: int = 0) -> None:
    async def main() -> None:
        suppliers = [FakeSupplier(i, is_ours=is_ours) for i in range(count)]
        engine = RoutedEngine(suppliers, policy="policy", watch_s=WATCH_S)
        await engine.open()
        try:
            await scenario(engine, suppliers)
        finally:
            await engine.aclose()

    run_virtual(main, seed=seed)


class Looks:
    """Counts looks at a replica; each takes a while, and comes to nothing if it is silent."""

    def __init__(self, replica: FakeReplica) -> None:
        self.times: list[float] = []
        self.is_silent = False
        replica.check = self.check  # type: ignore[method-assign]

    async def check(self) -> None:
        self.times.append(asyncio.get_running_loop().time())
        if self.is_silent:
            await asyncio.sleep(CHECK_S)
            raise LostServerError(f"did not answer within {CHECK_S:g} s")


def looks_of(suppliers: list[FakeSupplier]) -> list[Looks]:
    return [Looks(supplier.replica) for supplier in suppliers]


async def stand_still(seconds: float, times: int = 1) -> None:
    """Work of this process that the loop has no part in."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    for _ in range(times):
        loop._now += seconds
        await asyncio.sleep(0.01)


def test_looks_are_spread_over_the_interval() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        looks = looks_of(suppliers)
        await asyncio.sleep(2 * WATCH_S + 0.01)
        times = sorted(time for own in looks for time in own.times)
        assert [len(own.times) for own in looks] == [2] * 40
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert min(gaps) > 0.9 * WATCH_S / 40
        # Afterwards, too, though all were due while the loop stood still.
        await stand_still(3 * WATCH_S)
        await asyncio.sleep(WATCH_S)
        last = sorted(own.times[-1] for own in looks)
        gaps = [after - before for before, after in itertools.pairwise(last)]
        assert min(gaps) > 0.9 * WATCH_S / 40

    watched(scenario, 40)


def test_one_that_has_answered_since_is_not_looked_at() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        busy, idle = looks_of(suppliers)
        suppliers[1].replica.fail = LostServerError("not asked in vain")
        for _ in range(20):
            await engine.generate(request(group="one"))
            await asyncio.sleep(0.24 * WATCH_S)
        assert not busy.times
        assert len(idle.times) == 4
        await asyncio.sleep(2 * WATCH_S)
        assert busy.times

    watched(scenario, 2)


def test_a_silent_one_is_lost() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        looks_of(suppliers)[0].is_silent = True
        await asyncio.sleep(WATCH_S + CHECK_S)
        assert engine.num_serving == 1

    watched(scenario, 2)


def test_silence_does_not_count_while_this_process_is_late_itself() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        looks = looks_of(suppliers)
        for own in looks:
            own.is_silent = True
        await stand_still(2.0, times=50)
        assert all(own.times for own in looks)
        assert engine.num_serving == 3
        # It counts again when the loop is on time.
        await asyncio.sleep(2 * WATCH_S)
        assert engine.num_serving == 0

    watched(scenario, 3)


@pytest.mark.parametrize("seed", range(8))
def test_silence_does_not_count_where_this_process_stood_still_in_one_piece(seed: int) -> None:
    """Then the look ends in the same moment as the sleep that measures it, in whichever order."""

    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        for own in looks_of(suppliers):
            own.is_silent = True
        await asyncio.sleep(WATCH_S + 1)
        await stand_still(2 * CHECK_S)
        await asyncio.sleep(0.1)
        assert engine.num_serving == 1

    watched(scenario, 1, seed=seed)


def test_a_single_late_moment_in_a_long_silence_is_no_excuse() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        looks_of(suppliers)[0].is_silent = True
        await asyncio.sleep(WATCH_S / 2 + 1)
        await stand_still(1.0)
        await asyncio.sleep(CHECK_S)
        assert engine.num_serving == 1

    watched(scenario, 2)


def test_one_that_answers_a_request_during_a_look_is_well() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        looks_of(suppliers)[0].is_silent = True
        await asyncio.sleep(WATCH_S + 1)
        await engine.generate(request())
        await asyncio.sleep(CHECK_S)
        assert engine.num_serving == 1

    watched(scenario, 1)


def test_a_lost_one_is_not_started_again_while_this_process_is_late() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        looks_of(suppliers)[0].is_silent = True
        await asyncio.sleep(WATCH_S + CHECK_S)
        assert engine.num_serving == 1
        await stand_still(2.0, times=100)
        assert len(suppliers[0].started) == 1
        await asyncio.sleep(5 * WATCH_S)
        assert len(suppliers[0].started) == 2

    watched(scenario, 2, is_ours=True)


def test_a_dead_process_is_lost_however_late_this_one_is() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        suppliers[0].may_start.clear()
        suppliers[0].replica.kill()
        await stand_still(2.0, times=20)
        assert engine.num_serving == 1

    watched(scenario, 2, is_ours=True)
