"""The two orders of moving memory, checked against a ledger of who holds what."""

from __future__ import annotations

import asyncio

import pytest

from paceline.drivers.memory import KeepBoth, MemoryConfig, make_memory_plan
from paceline.engines.base import Request, Sampling
from paceline.errors import EngineError
from paceline.testing import FakeEngine, FakeTrainer, MemoryLedger
from paceline.weights.base import WeightPlan

WEIGHTS, CACHE, GRAPHS, TRAINER = 10, 50, 1, 40


def run_step(order: str) -> tuple[MemoryLedger, FakeEngine, FakeTrainer]:
    ledger = MemoryLedger()
    engine = FakeEngine(
        ledger=ledger, sizes={"weights": WEIGHTS, "kv_cache": CACHE, "graphs": GRAPHS}
    )
    trainer = FakeTrainer(ledger=ledger, size=TRAINER)
    plan = make_memory_plan(MemoryConfig(order=order), engine, trainer)

    async def step() -> None:
        await plan.before_learn()
        await plan.after_learn()
        await engine.receive(WeightPlan("policy", 1, "copy"))
        await plan.after_publish()
        await engine.generate(Request([3], Sampling(), seed=0))

    asyncio.run(step())
    return ledger, engine, trainer


def test_host_peak_never_has_both_on_the_device() -> None:
    ledger, _, _ = run_step("host")
    assert ledger.device_peak == WEIGHTS + CACHE + GRAPHS
    assert ledger.host_peak == TRAINER + WEIGHTS


def test_device_peak_never_has_both_on_the_host() -> None:
    ledger, _, _ = run_step("device")
    assert ledger.device_peak == max(WEIGHTS + CACHE + GRAPHS, WEIGHTS + TRAINER)
    assert ledger.host_peak == max(TRAINER, WEIGHTS)


@pytest.mark.parametrize("order", ["host", "device"])
def test_everything_is_back_after_the_step(order: str) -> None:
    ledger, _, _ = run_step(order)
    assert ledger.device == {
        "engine.weights": WEIGHTS,
        "engine.kv_cache": CACHE,
        "engine.graphs": GRAPHS,
        "trainer": 0,
    }


def test_generating_before_weights_came_back_is_refused() -> None:
    engine, trainer = FakeEngine(ledger=MemoryLedger()), FakeTrainer(ledger=MemoryLedger())
    plan = make_memory_plan(MemoryConfig(order="host"), engine, trainer)

    async def step() -> None:
        await plan.before_learn()
        await plan.after_learn()
        await plan.after_publish()
        await engine.generate(Request([3], Sampling(), seed=0))

    with pytest.raises(EngineError, match="weights due True"):
        asyncio.run(step())


def test_none_moves_nothing() -> None:
    assert isinstance(make_memory_plan(MemoryConfig(), FakeEngine(), FakeTrainer()), KeepBoth)
