"""The trainer on a GPU: the numbers of the CPU, moves to the host and back, saves."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from tiny import tiny_model
from trainer_rows import (
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

from paceline.errors import TrainerError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class OnDevice(PlainPolicyGradient):
    """The same algorithm; its zeros are made where the log-probs are."""

    def loss(self, inputs):
        with torch.device(inputs.logprobs_N.device):
            return super().loss(inputs)


def _trainer(model=None, **settings):
    return make_trainer(model, OnDevice(), **{"device": "cuda", **settings})


def _on_cpu(tensors):
    return {name: tensor.cpu() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"layout": "packed"},
        {"max_tokens_per_micro_batch": 40, "logprob_chunk_tokens": 16},
        {"activation_checkpointing": True},
        {"compile": True, "max_tokens_per_micro_batch": 100},
        {"compile": True, "layout": "packed", "activation_checkpointing": True},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler has a lot to say
def test_gradients_and_metrics_are_those_of_the_cpu(settings):
    """As far as the model's parts in float32 (norms, rotary embedding) agree."""
    rows = random_rows()
    metrics, expected = gradients(make_trainer(), rows)
    found_metrics, found = gradients(_trainer(**settings), rows)
    assert found_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-9)
    assert_close(_on_cpu(found), expected, 1e-5)


@pytest.mark.parametrize("autocast", ["off", "bfloat16"])
def test_first_update_has_a_ratio_of_exactly_one(autocast):
    rows = random_rows(num=40)
    trainer = _trainer(tiny_model(), autocast=autocast, max_tokens_per_micro_batch=100)
    for row, old_T in zip(rows, asyncio.run(trainer.forward(rows, "policy")), strict=True):
        row.old_logprobs_T = old_T
    metrics, _ = gradients(trainer, rows)
    assert metrics["train/ratio_error"] == 0.0


def test_on_the_host_it_holds_no_device_memory_and_comes_back_bit_for_bit():
    batches = [random_rows(seed=seed) for seed in range(4)]
    straight = _trainer(deterministic=True)
    expected = train(straight, batches)
    moved = _trainer(reference=model64(seed=3), deterministic=True)
    found = train(moved, batches[:2])
    parameters = list(moved._core.model.parameters())
    held, own = torch.cuda.memory_allocated(), sum(p.nbytes for p in parameters)
    for _ in range(2):
        asyncio.run(moved.place("host"))
    # Weights, two moments and the reference.
    assert torch.cuda.memory_allocated() <= held - 4 * own
    with pytest.raises(TrainerError, match='place\\("device"\\)'):
        gradients(moved, batches[0])
    with pytest.raises(TrainerError, match="on the host"):
        asyncio.run(moved.forward(batches[0], "policy"))
    asyncio.run(moved.place("device"))
    assert all(a is b for a, b in zip(moved._core.model.parameters(), parameters, strict=True))
    assert found + train(moved, batches[2:]) == expected
    assert_equal(weights(moved._core.model), weights(straight._core.model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("saved_on", ["device", "host"])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, dtype, saved_on):
    batches = [random_rows(seed=seed) for seed in range(4)]
    straight = _trainer(tiny_model(dtype=dtype), deterministic=True)
    expected = train(straight, batches)
    first = _trainer(tiny_model(dtype=dtype), deterministic=True)
    train(first, batches[:2])
    asyncio.run(first.place(saved_on))
    asyncio.run(first.save(tmp_path))
    second = _trainer(tiny_model(seed=5, dtype=dtype), deterministic=True)
    asyncio.run(second.load(tmp_path))
    assert train(second, batches[2:]) == expected[2:]
    assert_equal(weights(second._core.model), weights(straight._core.model))
    assert_equal(moments_of(second), moments_of(straight))


def test_bfloat16_autocast_stays_near_float32():
    model = tiny_model()
    rows = random_rows()
    rough = asyncio.run(_trainer(model, autocast="bfloat16").forward(rows, "policy"))
    exact = asyncio.run(_trainer(model).forward(rows, "policy"))
    gap = max(float(np.abs(a - b).max()) for a, b in zip(rough, exact, strict=True))
    assert 0 < gap < 0.05
