"""The weight check: equal bits pass; whatever else is there is named."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_model

from paceline.engines import embedded
from paceline.engines.base import EmbeddedEngineConfig, Request, Sampling
from paceline.engines.embedded import EmbeddedEngine
from paceline.errors import EngineError, WeightError
from paceline.policy import Policy
from paceline.testing import FakeEngine
from paceline.weights.base import WeightPlan
from paceline.weights.check import check_weights, reset_weights
from paceline.weights.settings import EXACT, WeightCheckConfig
from paceline.weights.tensors import named_tensors


def engine_of(model: torch.nn.Module) -> EmbeddedEngine:
    config = EmbeddedEngineConfig(weights="copy")
    return EmbeddedEngine(config, model, None, policy="p", eos_token_ids=frozenset({1}))


def plan_of(model: torch.nn.Module) -> WeightPlan:
    return WeightPlan("p", 3, "copy", named_tensors(model))


def check(engine: object, plan: WeightPlan, how: WeightCheckConfig = EXACT) -> None:
    asyncio.run(check_weights(engine, plan, how))  # type: ignore[arg-type]


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


def test_a_tolerance_lets_rounding_pass_and_nothing_else() -> None:
    sender = tiny_model(seed=1)
    config = EmbeddedEngineConfig(weights="copy", dtype="bfloat16")
    engine = EmbeddedEngine(config, sender, None, policy="p", eos_token_ids=frozenset({1}))
    with pytest.raises(WeightError, match="tensors differ"):
        check(engine, plan_of(sender))
    check(engine, plan_of(sender), WeightCheckConfig(tolerance=0.004))
    name = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        dict(engine._module.named_parameters())[name].mul_(1.01)
    wrong = r"1 of \d+ tensors differ: model.layers.1.mlp.up_proj.weight \(relative error 0.0\d+\)"
    with pytest.raises(WeightError, match=wrong):
        check(engine, plan_of(sender), WeightCheckConfig(tolerance=0.004))
    check(engine, plan_of(sender), WeightCheckConfig(tolerance=0.004, skip=("*.1.mlp.*",)))
    check(engine, plan_of(sender), WeightCheckConfig(tolerance=0.004, only=("*.0.*", "*norm*")))


def test_patterns_choose_tensors_on_both_sides() -> None:
    sender = tiny_model(seed=1)
    plan = plan_of(sender)
    assert plan.tensors is not None
    tensors = dict(plan.tensors) | {"extra.weight": torch.zeros(2)}
    del tensors["model.norm.weight"]
    plan = replace(plan, tensors=tensors)
    check(engine_of(sender), plan, WeightCheckConfig(skip=("extra.*", "model.norm.*")))
    check(engine_of(sender), plan, WeightCheckConfig(only=("*.mlp.*",)))
    with pytest.raises(WeightError, match=r"'lm_head\.\*' names none of the \d+ tensors"):
        check(engine_of(sender), plan, WeightCheckConfig(only=("*.mlp.*", "lm_head.*")))


@pytest.mark.parametrize("resets", [False, True])
def test_a_tensor_that_is_never_written_shows_after_a_reset(
    resets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine starts with the trainer's weights, so without a reset nothing is to be seen."""
    model = tiny_model(seed=1)
    engine = engine_of(model)
    trainer = SimpleNamespace(version=0, send=lambda plan: sent(plan, model))
    how = WeightCheckConfig(when="first", reset=resets, skip=("*.0.mlp.up_proj.*",))
    policy = Policy("p", None, engine, trainer, "copy", check=how)  # type: ignore[arg-type]
    real = embedded.receive_into
    lost = {"model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"}

    def forgetful(module: torch.nn.Module, plan: WeightPlan) -> None:
        parameters = dict(module.named_parameters())
        kept = {name: parameters[name].detach().clone() for name in lost}
        real(module, plan)
        with torch.no_grad():
            for name, tensor in kept.items():
                parameters[name].copy_(tensor)

    monkeypatch.setattr(embedded, "receive_into", forgetful)

    async def body() -> None:
        if resets:
            with pytest.raises(WeightError, match=r"1 of \d+ tensors differ: .*1.mlp.up_proj") as e:
                await policy.publish()
            assert "all of them stay paused" in e.value.__notes__[0]
        else:
            await policy.publish()
        await engine.aclose()

    asyncio.run(body())


def test_a_reset_serves_nobody_until_weights_have_come() -> None:
    model, engine = tiny_model(seed=1), engine_of(tiny_model(seed=1))

    async def body() -> None:
        await engine.pause("finish")
        await reset_weights(engine, plan_of(model), WeightCheckConfig(skip=("*norm*",)))
        held = named_tensors(engine._module)
        assert all(t.isnan().all() != ("norm" in name) for name, t in held.items())
        await engine.resume()
        with pytest.raises(EngineError, match="none were received since"):
            await engine.generate(Request([5], Sampling(), seed=0))
        await engine.receive(plan_of(model))
        await check_weights(engine, plan_of(model))
        await engine.generate(Request([5], Sampling(), seed=0))
        await engine.aclose()

    asyncio.run(body())


def test_what_is_shared_or_can_not_be_reset() -> None:
    model = tiny_model(seed=1)
    before = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    shared = EmbeddedEngine(
        EmbeddedEngineConfig(weights="shared"), model, None, policy="p", eos_token_ids=frozenset()
    )

    async def body() -> None:
        await reset_weights(shared, WeightPlan("p", 0, "shared"), EXACT)
        await shared.aclose()
        with pytest.raises(WeightError, match="can not be reset"):
            await reset_weights(FakeEngine(), plan_of(model), EXACT)

    asyncio.run(body())
    assert all(torch.equal(tensor, before[n]) for n, tensor in named_tensors(model).items())


@pytest.mark.parametrize(("check", "fails_at"), [("first", 0), ("always", 1), ("never", None)])
def test_a_publish_that_misses_a_tensor_ends_in_an_error(
    check: Any, fails_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first publish is of the same weights, unless it is to fail; then all but one change."""
    model = tiny_model(seed=1)
    engine = engine_of(tiny_model(seed=2) if fails_at == 0 else model)
    trainer = SimpleNamespace(version=0, send=lambda plan: sent(plan, model))
    how = WeightCheckConfig(when=check)
    policy = Policy("p", None, engine, trainer, "copy", check=how)  # type: ignore[arg-type]
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
