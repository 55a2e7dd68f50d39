"""The weight check: equal bits pass; whatever else is there is named."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_model

from paceline.engines import embedded
from paceline.engines.base import EmbeddedEngineConfig
from paceline.engines.embedded import EmbeddedEngine
from paceline.errors import WeightError
from paceline.policy import Policy
from paceline.testing import FakeEngine
from paceline.weights.base import WeightPlan
from paceline.weights.check import WeightCheck, check_weights
from paceline.weights.tensors import named_tensors


def engine_of(model: torch.nn.Module) -> EmbeddedEngine:
    config = EmbeddedEngineConfig(weights="copy")
    return EmbeddedEngine(config, model, None, policy="p", eos_token_ids=frozenset({1}))


def plan_of(model: torch.nn.Module) -> WeightPlan:
    return WeightPlan("p", 3, "copy", named_tensors(model))


def check(engine: object, plan: WeightPlan) -> None:
    asyncio.run(check_weights(engine, plan))  # type: ignore[arg-type]


def test_what_was_received_is_what_was_sent() -> None:
    sender, engine = tiny_model(seed=1), engine_of(tiny_model(seed=2))
    with pytest.raises(WeightError, match="tensors differ"):
        check(engine, plan_of(sender))
    asyncio.run(engine.receive(plan_of(sender)))
    check(engine, plan_of(sender))


def test_one_bit_is_enough_and_its_tensor_is_named() -> None:
    sender = tiny_model(seed=1)
    engine = engine_of(sender)
    with torch.no_grad():
        flat = sender.model.layers[1].mlp.up_proj.weight.view(-1)
        flat[7] = torch.nextafter(flat[7], torch.tensor(9.0))
    with pytest.raises(WeightError, match=r"1 of \d+ tensors differ: model.layers.1.mlp.up_proj"):
        check(engine, plan_of(sender))


def test_missing_and_foreign_tensors_are_named() -> None:
    sender = tiny_model(seed=1)
    plan = plan_of(sender)
    assert plan.tensors is not None
    tensors = dict(plan.tensors) | {"extra.weight": torch.zeros(2)}
    del tensors["model.norm.weight"]
    with pytest.raises(WeightError, match=r"missing: extra.weight.*trainer: model.norm.weight"):
        check(engine_of(sender), replace(plan, tensors=tensors))


def test_what_can_not_be_checked_is_refused() -> None:
    model = tiny_model()
    with pytest.raises(WeightError, match="can not tell what it holds"):
        check(FakeEngine(), plan_of(model))
    with pytest.raises(WeightError, match="no tensors"):
        check(engine_of(model), WeightPlan("p", 0, "copy"))


@pytest.mark.parametrize(("check", "fails_at"), [("first", 0), ("always", 1), ("never", None)])
def test_a_publish_that_misses_a_tensor_ends_in_an_error(
    check: WeightCheck, fails_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first publish is of the same weights, unless it is to fail; then all but one change."""
    model = tiny_model(seed=1)
    engine = engine_of(tiny_model(seed=2) if fails_at == 0 else model)
    trainer = SimpleNamespace(version=0, send=lambda plan: sent(plan, model))
    policy = Policy("p", None, engine, trainer, "copy", check=check)  # type: ignore[arg-type]
    real = embedded.receive_into

    def forgetful(module: torch.nn.Module, plan: WeightPlan) -> None:
        kept = dict(module.named_parameters())["model.norm.weight"].detach().clone()
        real(module, plan)
        with torch.no_grad():
            dict(module.named_parameters())["model.norm.weight"].copy_(kept)

    monkeypatch.setattr(embedded, "receive_into", forgetful)

    async def body() -> None:
        for number in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(float(number or fails_at == 0))
            if number == fails_at:
                with pytest.raises(WeightError, match=r"model\.norm\.weight"):
                    await policy.publish()
                break
            await policy.publish()
        else:
            assert fails_at is None
        await engine.aclose()

    asyncio.run(body())


async def sent(plan: WeightPlan, model: torch.nn.Module) -> WeightPlan:
    return replace(plan, tensors=named_tensors(model))
