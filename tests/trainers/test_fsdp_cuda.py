"""A sharded trainer on GPUs: the numbers of the CPU, moves to the host and back, offload, saves."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from fsdp_hosts import hosts
from fsdp_models import GivenModel, critic_of
from tiny import tiny_model
from trainer_rows import (
    VOCAB,
    PlainPolicyGradient,
    assert_close,
    assert_equal,
    gradients,
    make_trainer,
    model64,
    moments_of,
    random_rows,
    train,
    weights,
)

from paceline.algorithms import ALGORITHMS
from paceline.algorithms.grpo import Grpo
from paceline.errors import TrainerError
from paceline.types import Batch
from paceline.weights.base import WeightPlan
from paceline.weights.receive import receive_parcels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NEAR = 1e-5
"""As far as the model's parts in float32 (norms, rotary embedding) agree with those of a CPU."""
FULL = PlainPolicyGradient(kl_coef=0.3, entropy_coef=0.2)
SETTINGS = [
    {},
    {"layout": "packed"},
    {"max_tokens_per_micro_batch": 40, "logprob_chunk_tokens": 16},
    {"activation_checkpointing": True, "max_tokens_per_micro_batch": 40},
    {"keep_gathered": True, "max_tokens_per_micro_batch": 40},
    {"cpu_offload": True, "max_tokens_per_micro_batch": 40},
    {"compile": True, "max_tokens_per_micro_batch": 40},
]


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request, tmp_path_factory):
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} CUDA devices")
    logs = tmp_path_factory.mktemp("logs")
    with hosts(request.param, logs, gpus=range(request.param)) as made:
        yield made


def _source(seed: int = 0, dtype: torch.dtype = torch.float64) -> GivenModel:
    return GivenModel(tiny_model, {"seed": seed, "vocab": VOCAB, "dtype": dtype})


def _scored_rows(seed: int = 0, num: int = 12):
    rows = random_rows(seed, num)
    rng = np.random.default_rng(seed + 100)
    for row in rows:
        length = len(row.tokens_T)
        row.old_logprobs_T = (-4 + 0.3 * rng.normal(size=length)) * row.mask_T
        row.reference_logprobs_T = (-4 + 0.3 * rng.normal(size=length)) * row.mask_T
    return rows


def _learn(ranks, trainer, seed: int):
    ranks.run(trainer.forward_backward(Batch("policy", _scored_rows(seed))))
    return ranks.run(trainer.optim_step())


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_gradients_and_metrics_are_those_of_the_cpu(ranks, settings):
    rows = _scored_rows()
    metrics, expected = gradients(make_trainer(algorithm=FULL, reference=model64(7)), rows)
    trainer = ranks.make(_source(), FULL, reference=_source(7), **settings)
    found_metrics, found = ranks.gradients(trainer, rows)
    assert found_metrics == pytest.approx(metrics, rel=NEAR, abs=1e-9)
    assert_close(found, expected, NEAR)


@pytest.mark.parametrize("settings", [{}, {"cpu_offload": True}], ids=str)
def test_updated_weights_and_moments_are_those_of_the_cpu(ranks, settings):
    model = model64()
    common = {"lr_schedule": "linear", "weight_decay": 0.1, "max_grad_norm": 0.05}
    single = make_trainer(model, FULL, reference=model64(7), **common)
    reports = train(single, [_scored_rows(seed) for seed in range(3)])
    trainer = ranks.make(_source(), FULL, reference=_source(7), **common, **settings)
    for seed, expected in enumerate(reports):
        report = _learn(ranks, trainer, seed)
        assert report.grad_norm == pytest.approx(expected.grad_norm, rel=NEAR)
        assert (report.version, report.lr) == (expected.version, expected.lr)
    assert_close(ranks.ask("weights"), weights(model), 1e-4)
    assert_close(ranks.ask("moments"), moments_of(single), 1e-4)


@pytest.mark.parametrize("offload", [False, True])
def test_a_reference_and_the_policy_score_as_on_the_cpu(ranks, offload):
    rows = _scored_rows()
    single = make_trainer(algorithm=FULL, reference=model64(7))
    trainer = ranks.make(
        _source(), FULL, reference=_source(7), cpu_offload=offload, max_tokens_per_micro_batch=40
    )
    for head in ("policy", "reference"):
        expected = asyncio.run(single.forward(rows, head))
        for one, other in zip(ranks.run(trainer.forward(rows, head)), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=NEAR, atol=1e-7)


@pytest.mark.parametrize("autocast", ["off", "bfloat16"])
def test_first_update_has_a_ratio_of_exactly_one(ranks, autocast):
    rows = random_rows(num=40)
    trainer = ranks.make(
        _source(dtype=torch.float32),
        PlainPolicyGradient(),
        autocast=autocast,
        max_tokens_per_micro_batch=100,
        deterministic=True,
    )
    for row, old_T in zip(rows, ranks.run(trainer.forward(rows, "policy")), strict=True):
        row.old_logprobs_T = old_T
    metrics, found = ranks.gradients(trainer, rows)
    assert metrics["train/ratio_error"] == 0.0
    assert all(t.dtype == torch.float32 for t in found.values())


def test_autocast_stays_near_float32(ranks):
    rows = _scored_rows()
    _, expected = gradients(make_trainer(tiny_model(vocab=VOCAB), Grpo()), rows)
    trainer = ranks.make(_source(dtype=torch.float32), Grpo(), autocast="bfloat16")
    _, found = ranks.gradients(trainer, rows)
    assert_close(found, expected, 0.1)


@pytest.mark.parametrize("offload", [False, True])
def test_on_the_host_it_holds_no_device_memory_and_comes_back_bit_for_bit(ranks, offload):
    settings = {"reference": _source(7), "deterministic": True, "cpu_offload": offload}
    straight = ranks.make(_source(), Grpo(), **settings)
    for seed in range(4):
        _learn(ranks, straight, seed)
    expected, moments = ranks.ask("weights"), ranks.ask("moments")
    moved = ranks.make(_source(), Grpo(), **settings)
    for seed in range(2):
        _learn(ranks, moved, seed)
    on_device = ranks.ask("device_bytes")
    ranks.run(moved.place("host"))
    held = ranks.ask("device_bytes")
    num_bytes = sum(p.numel() for p in model64().parameters()) * 8 // ranks.size
    if not offload:
        assert held < on_device - 3 * num_bytes
    with pytest.raises(TrainerError, match="on the host"):
        _learn(ranks, moved, 2)
    ranks.run(moved.place("device"))
    for seed in range(2, 4):
        _learn(ranks, moved, seed)
    assert_equal(ranks.ask("weights"), expected)
    assert_equal(ranks.ask("moments"), moments)


@pytest.mark.parametrize("saved_on", ["device", "host"])
@pytest.mark.parametrize("offload", [False, True])
def test_a_resumed_run_goes_on_bit_for_bit(ranks, tmp_path, saved_on, offload):
    settings = {"deterministic": True, "cpu_offload": offload}
    straight = ranks.make(_source(dtype=torch.float32), Grpo(), **settings)
    _learn(ranks, straight, 0)
    path = tmp_path / "saved"
    path.mkdir()
    ranks.run(straight.place(saved_on))
    ranks.run(straight.save(path))
    ranks.run(straight.place("device"))
    _learn(ranks, straight, 1)
    expected, moments = ranks.ask("weights"), ranks.ask("moments")
    resumed = ranks.make(_source(5, dtype=torch.float32), Grpo(), **settings)
    ranks.run(resumed.place(saved_on))
    ranks.run(resumed.load(path))
    ranks.run(resumed.place("device"))
    _learn(ranks, resumed, 1)
    assert_equal(ranks.ask("weights"), expected)
    assert_equal(ranks.ask("moments"), moments)
    single = make_trainer(tiny_model(seed=4, vocab=VOCAB), Grpo())
    asyncio.run(single.load(path))
    assert single.version == 1


def test_a_critic_has_the_gradients_of_the_cpu(ranks):
    objective = ALGORITHMS["ppo"]().critic
    rows = _scored_rows()
    rng = np.random.default_rng(5)
    for row in rows:
        row.values_T = rng.normal(size=len(row.tokens_T)) * row.mask_T
        row.returns_T = rng.normal(size=len(row.tokens_T)) * row.mask_T
    named = {"vocab": VOCAB, "dtype": torch.float64}
    metrics, expected = gradients(make_trainer(critic_of(**named), objective), rows)
    trainer = ranks.make(GivenModel(critic_of, named), objective, head="values")
    found_metrics, found = ranks.gradients(trainer, rows)
    assert found_metrics == pytest.approx(metrics, rel=NEAR, abs=1e-9)
    assert_close(found, expected, NEAR)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("transport", ["handles", "disk"])
def test_another_process_gets_the_trainers_weights(ranks, tmp_path, transport, device):
    trainer = ranks.make(_source(dtype=torch.float32), Grpo(), lr=1e-2)
    model = tiny_model(seed=8, vocab=VOCAB).to(device)
    for version in range(1, 4):
        _learn(ranks, trainer, version)
        plan = WeightPlan(
            "policy", version, transport, bucket_bytes=20_000, folder=tmp_path / "weights"
        )
        ranks.run(receive_parcels(model, ranks.run(trainer.send(plan))))
        assert_equal({n: t.cpu() for n, t in weights(model).items()}, ranks.ask("weights"))


def test_memory_does_not_grow_over_moves(ranks):
    named = {"vocab": VOCAB, "hidden": 256, "layers": 4}
    trainer = ranks.make(
        GivenModel(tiny_model, named), Grpo(), max_tokens_per_micro_batch=60, autocast="bfloat16"
    )
    seen = []
    for _ in range(6):
        _learn(ranks, trainer, 0)
        ranks.run(trainer.place("host"))
        ranks.run(trainer.place("device"))
        seen.append(ranks.ask("device_bytes"))
    assert max(seen[2:]) <= seen[1]
