"""The package's algorithms through the trainer: numbers that no layout changes, and learning."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from tiny import tiny_model
from trainer_rows import (
    assert_close,
    gradients,
    make_trainer,
    model64,
    random_rows,
    train,
    weights,
)

from paceline.algorithms.grpo import Grpo
from paceline.algorithms.sft import Sft
from paceline.types import Batch

ALGORITHMS = {
    "grpo": Grpo(),
    "grpo, kl and entropy": Grpo(kl_coef=0.2, entropy_coef=0.1, clip_high=0.3, dual_clip=3.0),
    "grpo, k1": Grpo(kl_coef=0.2, kl_estimator="k1"),
    "sft": Sft(),
}


def _rows(algorithm, seed=0, num=12):
    rows = random_rows(seed, num)
    rng = np.random.default_rng(seed)
    for row in rows:
        noise_T = rng.normal(size=(2, len(row.tokens_T)))
        if algorithm.learns_from_rollouts:
            row.old_logprobs_T = (-4 + 0.3 * noise_T[0]) * row.mask_T
        if algorithm.needs_reference:
            row.reference_logprobs_T = (-4 + 0.3 * noise_T[1]) * row.mask_T
    return rows


def _trainer(algorithm, **settings):
    reference = model64(seed=7) if algorithm.needs_reference else None
    return make_trainer(algorithm=algorithm, reference=reference, **settings)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    "settings",
    [{"max_tokens_per_micro_batch": 1}, {"layout": "packed", "max_tokens_per_micro_batch": 60}],
    ids=str,
)
def test_loss_gradients_and_metrics_do_not_depend_on_how_rows_are_cut(name, settings):
    """Case 3, for micro-batching, packing and order."""
    algorithm = ALGORITHMS[name]
    rows = _rows(algorithm)
    metrics, expected = gradients(_trainer(algorithm), rows)
    found_metrics, found = gradients(_trainer(algorithm, **settings), rows[::-1])
    assert found_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)
    assert_close(found, expected, 1e-9)


def test_first_grpo_update_has_ratio_one_and_clips_nothing():
    """Case 20."""
    rows = random_rows()
    trainer = make_trainer(algorithm=Grpo(), max_tokens_per_micro_batch=40)
    for row, old_T in zip(rows, asyncio.run(trainer.forward(rows, "policy")), strict=True):
        row.old_logprobs_T = old_T
    metrics, _ = gradients(trainer, rows)
    assert metrics["train/ratio"] == 1.0
    assert metrics["train/clip_fraction"] == 0.0
    assert metrics["train/approx_kl"] == 0.0


def test_a_reference_far_away_stays_finite_and_is_learned_from():
    """Case 14: a log-ratio of 100 to the reference; loss, gradient and a step are finite."""
    model = tiny_model(dtype=torch.float32)
    rows = random_rows(kind=np.float32)
    for row in rows:
        row.reference_logprobs_T = (100.0 * row.mask_T).astype(np.float32)
    trainer = make_trainer(model, Grpo(kl_coef=0.1), reference=tiny_model(seed=2))
    metrics = asyncio.run(trainer.forward_backward(Batch("policy", rows))).values()
    report = asyncio.run(trainer.optim_step())
    assert not report.is_skipped
    assert all(np.isfinite(value) for value in metrics.values())
    assert all(torch.isfinite(tensor).all() for tensor in weights(model).values())


def test_a_kl_term_pulls_the_policy_towards_the_reference():
    """Case 16: with no advantage, steps on the KL term alone lower it."""
    model, reference = model64(), model64(seed=7)
    rows = random_rows(num=8)
    for row in rows:
        row.advantages_T[:] = 0.0
    trainer = make_trainer(
        model, Grpo(kl_coef=1.0, kl_estimator="k3"), reference=reference, lr=1e-3
    )
    for row, scored_T in zip(rows, asyncio.run(trainer.forward(rows, "reference")), strict=True):
        row.reference_logprobs_T = scored_T
    before, _ = gradients(trainer, rows)
    train(trainer, [rows] * 10)
    after, _ = gradients(trainer, rows)
    assert 0 < after["train/kl_reference"] < 0.8 * before["train/kl_reference"]


def test_supervised_steps_learn_a_sequence_by_heart():
    rows = random_rows(num=4)
    trainer = make_trainer(algorithm=Sft(), lr=1e-2)
    first, _ = gradients(trainer, rows)
    train(trainer, [rows] * 40)
    last, _ = gradients(trainer, rows)
    assert first["train/nll"] > 3.5
    assert last["train/nll"] < 0.5
    assert "train/mismatch_max" not in last


def test_policy_gradient_raises_what_is_rewarded_and_lowers_what_is_not():
    rows = random_rows(num=6)
    for index, row in enumerate(rows):
        row.advantages_T = (1.0 if index % 2 else -1.0) * row.mask_T.astype(np.float64)
    trainer = make_trainer(algorithm=Grpo(), lr=1e-3)
    before = asyncio.run(trainer.forward(rows, "policy"))
    train(trainer, [rows] * 5)
    after = asyncio.run(trainer.forward(rows, "policy"))
    changes = [float((b - a).sum()) for a, b in zip(before, after, strict=True)]
    assert all(change > 0 for change in changes[1::2])
    assert all(change < 0 for change in changes[::2])
