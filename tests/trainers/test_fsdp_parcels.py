"""A sharded trainer hands whole tensors to other processes, by every transport."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

import pytest
import torch
from architectures import small_model
from fsdp_models import GivenModel
from tiny import tiny_model
from trainer_rows import VOCAB, assert_equal, random_rows, weights

from paceline.algorithms.grpo import Grpo
from paceline.errors import WeightError
from paceline.types import Batch
from paceline.weights.base import Meeting, WeightPlan
from paceline.weights.buckets import num_bytes, views
from paceline.weights.collective import broadcast, join, leave
from paceline.weights.receive import receive_parcels
from paceline.weights.tensors import checksums, named_tensors


def _trained(ranks):
    trainer = ranks.make(GivenModel(tiny_model, {"vocab": VOCAB}), Grpo(), lr=1e-2)
    ranks.run(trainer.forward_backward(Batch("policy", random_rows())))
    ranks.run(trainer.optim_step())
    return trainer


@pytest.mark.parametrize("transport", ["handles", "disk"])
def test_an_engine_of_this_process_gets_the_trainers_weights(ranks, tmp_path, transport):
    trainer = _trained(ranks)
    model = tiny_model(seed=8, vocab=VOCAB)
    plan = WeightPlan("policy", 1, transport, bucket_bytes=20_000, folder=tmp_path / "weights")
    for version in (1, 2):
        sent = ranks.run(trainer.send(plan))
        ranks.run(receive_parcels(model, sent))
        assert_equal(weights(model), ranks.ask("weights"))
        found = ranks.run(sent.source.checksums())
        assert found == checksums(named_tensors(model))
        if version == 1:
            ranks.run(trainer.forward_backward(Batch("policy", random_rows(seed=4))))
            ranks.run(trainer.optim_step())
            plan = WeightPlan(
                "policy", 2, transport, bucket_bytes=20_000, folder=tmp_path / "weights"
            )


def test_a_receiver_that_stops_early_leaves_the_trainer_ready(ranks):
    trainer = _trained(ranks)
    plan = ranks.run(trainer.send(WeightPlan("policy", 1, "handles", bucket_bytes=10_000)))

    async def take_one() -> int:
        async with aclosing(plan.source.parcels()) as parcels:
            async for parcel in parcels:
                return len(parcel.handles)
        return 0

    assert ranks.run(take_one()) == 1
    model = tiny_model(seed=8, vocab=VOCAB)
    ranks.run(receive_parcels(model, plan))
    assert_equal(weights(model), ranks.ask("weights"))


def test_a_broadcast_reaches_a_receiver(ranks):
    trainer = _trained(ranks)
    plan = ranks.run(trainer.send(WeightPlan("policy", 1, "collective", bucket_bytes=20_000)))
    source = plan.source
    found: dict[str, torch.Tensor] = {}

    async def publish() -> None:
        address, port = await source.meeting_point()
        meeting = Meeting("first", address, port, 2, "gloo")
        joined = asyncio.create_task(asyncio.to_thread(join, meeting, 1, 30.0))
        await source.meet(meeting)
        group = await joined
        async with aclosing(source.parcels()) as parcels:
            async for parcel in parcels:
                flat = torch.empty(sum(map(num_bytes, parcel.tensors)), dtype=torch.uint8)
                receiving = asyncio.create_task(asyncio.to_thread(broadcast, group, flat, 30.0))
                await source.broadcast(parcel)
                await receiving
                found.update((n, t.clone()) for n, t in views(flat, parcel.tensors))
        leave(group)

    ranks.run(publish())
    assert_equal(found, ranks.ask("weights"))


def test_a_broadcast_that_nobody_receives_is_given_up_and_the_trainer_goes_on(ranks):
    trainer = _trained(ranks)
    plan = ranks.run(trainer.send(WeightPlan("policy", 1, "collective", bucket_bytes=20_000)))
    source = plan.source
    is_over = threading.Event()

    async def publish() -> None:
        address, port = await source.meeting_point()
        meeting = Meeting("second", address, port, 2, "gloo")
        joined = asyncio.create_task(asyncio.to_thread(join, meeting, 1, 30.0))
        await source.meet(meeting)
        group = await joined
        async with aclosing(source.parcels()) as parcels:
            async for parcel in parcels:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(source.broadcast(parcel), 0.2)
                break
        leave(group)
        is_over.set()

    ranks.run(publish())
    assert is_over.is_set()
    ranks.run(trainer.forward_backward(Batch("policy", random_rows())))
    assert ranks.run(trainer.optim_step()).version == 2
    with pytest.raises(WeightError):
        ranks.run(source.broadcast(None))


def test_fused_experts_travel_as_a_checkpoint_has_them(ranks):
    ranks_trainer = ranks.make(GivenModel(small_model, {"name": "mixtral"}), Grpo())
    plan = ranks.run(ranks_trainer.send(WeightPlan("policy", 1, "handles", bucket_bytes=1 << 20)))

    async def names() -> set[str]:
        found = set()
        async with aclosing(plan.source.parcels()) as parcels:
            async for parcel in parcels:
                found |= {info.name for info in parcel.tensors}
        return found

    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in ranks.run(names())
