"""A trainer of one process sends in parcels; engines and modules take them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model
from trainer_rows import make_trainer

from paceline.engines.base import EmbeddedEngineConfig, Request, Sampling
from paceline.engines.embedded import EmbeddedEngine
from paceline.errors import EngineError, WeightError
from paceline.weights.base import Meeting, Parcel, TensorInfo, Transport, WeightPlan
from paceline.weights.check import check_weights
from paceline.weights.publish import publish
from paceline.weights.receive import receive_into, receive_parcels
from paceline.weights.settings import WeightCheckConfig
from paceline.weights.shared_memory import PREFIX, ROOT
from paceline.weights.source import LocalSource, Outbox
from paceline.weights.tensors import checksums, named_tensors

SMALL = 9000
"""Bytes of a bucket: several parcels, and some tensors that need one of their own."""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    own = f"{PREFIX}{os.getpid()}-*"  # other tests run beside this one
    before = set(ROOT.glob(own))
    yield
    assert set(ROOT.glob(own)) <= before


def engine_of(model: torch.nn.Module) -> EmbeddedEngine:
    config = EmbeddedEngineConfig(weights="copy")
    return EmbeddedEngine(config, model, None, policy="p", eos_token_ids=frozenset({1}))


def plan_of(transport: Transport, folder: Path | None = None) -> WeightPlan:
    return WeightPlan("p", 3, transport, bucket_bytes=SMALL, folder=folder)


def sent(box: Outbox, plan: WeightPlan) -> WeightPlan:
    return replace(plan, source=LocalSource(box, plan, asyncio.to_thread))


@pytest.mark.parametrize("transport", ["handles", "disk"])
def test_an_engine_takes_what_a_trainer_of_another_kind_publishes(
    transport: Transport, tmp_path: Path
) -> None:
    trained, engine = tiny_model(seed=1), engine_of(tiny_model(seed=2))
    trainer = make_trainer(trained)
    plan = plan_of(transport, tmp_path / "w" if transport == "disk" else None)

    async def run() -> None:
        done = await publish(trainer, {"e": engine}, plan, verify=check_weights)
        assert done.source is not None
        assert await engine.checksums() == await done.source.checksums()
        request = Request([5, 6], Sampling(max_tokens=3), seed=1)
        assert set((await engine.generate(request)).versions) == {3}
        with torch.no_grad():
            trained.model.norm.weight.mul_(2)
        again = replace(plan, version=4)
        await publish(trainer, {"e": engine}, again, verify=check_weights)
        assert engine.version == 4
        await trainer.aclose()
        await engine.aclose()

    asyncio.run(run())
    assert not (tmp_path / "w").exists()


def test_an_engine_that_got_half_of_it_serves_nobody() -> None:
    engine = engine_of(tiny_model(seed=2))
    model = tiny_model(seed=1)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(named_tensors(model).items())[:4]
        raise ArithmeticError("no more")

    async def run() -> None:
        with pytest.raises(ArithmeticError):
            await engine.receive(sent(Outbox(broken), plan_of("handles")))
        with pytest.raises(EngineError, match="publish"):
            await engine.generate(Request([5, 6], Sampling(max_tokens=3), seed=1))
        box = Outbox(lambda: named_tensors(model).items())
        await engine.receive(sent(box, plan_of("handles")))
        assert await engine.checksums() == checksums(named_tensors(model))
        await engine.aclose()

    asyncio.run(run())


def test_parcels_are_bounded_and_hold_each_tensor_once() -> None:
    tensors = named_tensors(tiny_model())
    box = Outbox(lambda: tensors.items())
    box.open(1, "handles", SMALL)
    parcels = []
    while (parcel := box.next_parcel()) is not None:
        parcels.append(parcel)
    box.close()
    names = [info.name for parcel in parcels for info in parcel.tensors]
    assert names == list(tensors)
    assert len(parcels) > 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "1 parameters did not come: model.norm.weight"),
        (lambda t: t.update(extra=torch.ones(2)), r"1 tensors .*: extra \(2,\)"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(3)}),
            r"no place of their shape .*: model.norm.weight \(3,\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    tensors = dict(named_tensors(tiny_model(seed=1)))
    change(tensors)
    plan = sent(Outbox(lambda: tensors.items()), plan_of("handles"))
    with pytest.raises(WeightError, match=message):
        asyncio.run(receive_parcels(tiny_model(seed=2), plan))


def test_types_may_differ_and_tied_names_may_come() -> None:
    trained, served = tiny_model(seed=1), tiny_model(seed=2, dtype=torch.bfloat16)
    tensors = dict(named_tensors(trained))
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    plan = sent(Outbox(lambda: tensors.items()), plan_of("handles"))
    asyncio.run(receive_parcels(served, plan))
    assert torch.equal(served.lm_head.weight, trained.lm_head.weight.bfloat16())


def test_plans_that_can_not_be_received_are_refused(tmp_path: Path) -> None:
    model = tiny_model()
    with pytest.raises(WeightError, match="no source"):
        asyncio.run(receive_parcels(model, plan_of("handles")))
    box = Outbox(lambda: named_tensors(model).items())
    with pytest.raises(WeightError, match="can not receive 'collective'"):
        asyncio.run(receive_parcels(model, sent(box, plan_of("collective"))))
    with pytest.raises(WeightError, match="needs a folder"):
        asyncio.run(receive_parcels(model, sent(box, plan_of("disk"))))
    with pytest.raises(WeightError, match="comes in parcels"):
        receive_into(model, plan_of("handles"))
    shared = EmbeddedEngine(
        EmbeddedEngineConfig(), model, None, policy="p", eos_token_ids=frozenset({1})
    )
    with pytest.raises(WeightError, match="takes transport 'shared', and was sent 'handles'"):
        asyncio.run(shared.receive(sent(box, plan_of("handles"))))


def test_an_outbox_that_is_misused_says_so() -> None:
    box = Outbox(lambda: [("w", torch.ones(2))])
    with pytest.raises(WeightError, match="no publish is open"):
        box.next_parcel()
    with pytest.raises(WeightError, match="no parcel to broadcast"):
        box.broadcast()
    with pytest.raises(WeightError, match="does not go between processes"):
        box.open(1, "shared", SMALL)
    with pytest.raises(WeightError, match="ask for a meeting point first"):
        box.meet(Meeting("m", "127.0.0.1", 1, 2, "gloo"))
    box.open(1, "collective", SMALL)
    with pytest.raises(WeightError, match="has met nobody"):
        box.next_parcel()
    box.dispose()
    box.dispose()


def test_an_address_that_is_not_of_this_machine_is_named() -> None:
    with pytest.raises(WeightError, match=r"no port of 192\.0\.2\.1 can be listened on"):
        Outbox(lambda: [], address="192.0.2.1").meeting_point()


def test_a_second_receiver_waits_for_its_turn() -> None:
    tensors = named_tensors(tiny_model(seed=1))
    plan = sent(Outbox(lambda: tensors.items()), plan_of("handles"))
    models = [tiny_model(seed=2), tiny_model(seed=3)]

    async def run() -> None:
        async with asyncio.timeout(30):
            await asyncio.gather(*(receive_parcels(model, plan) for model in models))

    asyncio.run(run())
    assert all(checksums(named_tensors(m)) == checksums(tensors) for m in models)


def test_a_receiver_that_gives_up_ends_the_publish() -> None:
    tensors = named_tensors(tiny_model(seed=1))
    box = Outbox(lambda: tensors.items())
    plan = sent(box, plan_of("handles"))

    async def run() -> None:
        async def hang() -> None:
            assert plan.source is not None
            async for _ in plan.source.parcels():
                await asyncio.Event().wait()

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await hang()
        async with asyncio.timeout(10):
            await receive_parcels(tiny_model(seed=2), plan)

    asyncio.run(run())


def test_only_the_sender_of_a_sharded_trainer_hands_over_what_is_on_the_cpu() -> None:
    tensors = named_tensors(tiny_model())
    boxes = [Outbox(lambda: tensors.items(), is_sender=is_sender) for is_sender in (True, False)]
    for box in boxes:
        box.open(1, "handles", SMALL)
    while True:
        first, second = (box.next_parcel() for box in boxes)
        if first is None or second is None:
            assert first is second
            break
        assert first.tensors == second.tensors
        assert (len(first.handles), len(second.handles)) == (1, 0)
    for box in boxes:
        box.close()
    assert boxes[1].checksums() == {}


class Told:
    """An engine that compares for itself."""

    def __init__(self, *differences: str) -> None:
        self.differences = list(differences)

    async def holds(self, plan: WeightPlan, check: WeightCheckConfig) -> list[str]:
        return self.differences


def test_the_weight_check_asks_an_engine_that_compares_itself() -> None:
    plan = sent(Outbox(lambda: []), plan_of("handles"))
    asyncio.run(check_weights(Told(), plan))  # type: ignore[arg-type]
    with pytest.raises(WeightError, match=r"version 3: .* sent: q_proj is old; and more"):
        asyncio.run(check_weights(Told("q_proj is old", "and more"), plan))  # type: ignore[arg-type]


def test_a_source_is_compared_with_what_an_engine_tells() -> None:
    model, engine = tiny_model(seed=1), engine_of(tiny_model(seed=2))
    plan = sent(Outbox(lambda: named_tensors(model).items()), plan_of("handles"))

    async def run() -> None:
        with pytest.raises(WeightError, match="tensors differ"):
            await check_weights(engine, plan)
        await engine.receive(plan)
        await check_weights(engine, plan)
        await engine.aclose()

    asyncio.run(run())


class OneParcel:
    """A source of a single parcel of one's own."""

    def __init__(self, parcel: Parcel) -> None:
        self.parcel = parcel

    async def parcels(self) -> AsyncIterator[Parcel]:
        yield self.parcel


def test_a_parcel_without_anything_is_refused() -> None:
    parcel = Parcel((TensorInfo("model.norm.weight", "float32", (32,)),))
    source: Any = OneParcel(parcel)
    with pytest.raises(WeightError, match="neither handles nor a folder"):
        asyncio.run(receive_parcels(tiny_model(), replace(plan_of("handles"), source=source)))


def test_work_is_done_in_the_thread_that_is_given() -> None:
    seen: set[str] = set()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        seen.add(threading.current_thread().name)
        yield from named_tensors(model).items()

    model = tiny_model(seed=1)
    trainer = make_trainer(model)
    trainer._outbox._tensors = tensors

    async def run() -> None:
        plan = await trainer.send(plan_of("handles"))
        await receive_parcels(tiny_model(seed=2), plan)
        await trainer.aclose()

    asyncio.run(run())
    assert len(seen) == 1
    assert seen.pop().startswith("trainer")
