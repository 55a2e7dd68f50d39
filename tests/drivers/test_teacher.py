"""A policy with a teacher: what is asked of it and when, and who is on the device."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from drivers.fake_run import make_group

from paceline.algorithms.distill import Distill
from paceline.drivers.memory import MemoryConfig, make_memory_plan
from paceline.policy import Policy
from paceline.testing import FakeEngine, FakeTeacher, FakeTrainer, MemoryLedger
from paceline.types import Batch, Draw, Prompt
from paceline.weights.base import WeightPlan

GROUP = make_group(Draw(0, 0, Prompt("p0", text="0")))


class Watching(FakeTrainer):
    """Keeps the batches that it learns from."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.batches: list[Batch] = []

    async def forward_backward(self, batch: Batch) -> Any:
        self.batches.append(batch)
        return await super().forward_backward(batch)


def policy_of(teacher: FakeTeacher, trainer: FakeTrainer, **settings: Any) -> Policy:
    algorithm = settings.pop("algorithm", Distill())
    engine = settings.pop("engine", FakeEngine())
    return Policy("policy", algorithm, engine, trainer, "copy", teacher=teacher, **settings)


def test_the_teacher_grades_once_a_step_before_anything_is_learned() -> None:
    trainer, teacher = Watching(), FakeTeacher(gap=0.25)
    policy = policy_of(teacher, trainer, epochs_per_step=2)
    _, metrics = asyncio.run(policy.learn([GROUP]))
    assert teacher.calls == ["grade 2"]
    assert len(trainer.batches) == 2
    for batch in trainer.batches:
        for row in batch.rows:
            assert row.teacher_logprobs_T is not None
            assert row.teacher_logprobs_T.tolist() == [0.0, -0.75, -0.5]
    assert metrics.values()["train/grad_norm"] == 1.0


@pytest.mark.parametrize("needs_reference", [False, True])
@pytest.mark.parametrize("order", ["host", "device"])
def test_teacher_and_trainer_are_never_on_the_device_together(
    order: str, needs_reference: bool
) -> None:
    ledger = MemoryLedger()
    engine = FakeEngine(ledger=ledger, sizes={"weights": 10, "kv_cache": 50, "graphs": 1})
    teacher, trainer = FakeTeacher(ledger=ledger, size=45), FakeTrainer(ledger=ledger, size=40)
    policy = policy_of(
        teacher,
        trainer,
        engine=engine,
        algorithm=Distill(kl_coef=0.1 if needs_reference else 0.0),
        takes_turns=True,
    )
    plan = make_memory_plan(MemoryConfig(order=order), engine, policy)  # type: ignore[arg-type]

    async def step() -> None:
        await plan.before_learn()
        await policy.learn([GROUP])
        await plan.after_learn()
        await engine.receive(WeightPlan("policy", 1, "copy"))
        await plan.after_publish()

    asyncio.run(step())
    asyncio.run(step())
    assert ledger.device_peak == 61  # the engine alone; teacher and trainer would be 85
    assert ledger.device["teacher"] == ledger.device["trainer"] == 0
    assert trainer.calls.count("optim_step") == 2


def test_where_nothing_takes_turns_nothing_moves() -> None:
    trainer, teacher = FakeTrainer(), FakeTeacher()
    asyncio.run(policy_of(teacher, trainer).learn([GROUP]))
    assert not [call for call in [*trainer.calls, *teacher.calls] if call.startswith("place")]
