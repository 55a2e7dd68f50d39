"""Rows without a gradient cost no backward, and change no number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_rows import (
    PlainPolicyGradient,
    assert_close,
    gradients,
    make_trainer,
    model64,
    moments_of,
    random_rows,
    train,
    weights,
)

from paceline.algorithms import ALGORITHMS
from paceline.algorithms.correction import Correction
from paceline.algorithms.distill import Distill
from paceline.algorithms.grpo import Grpo
from paceline.algorithms.gspo import Gspo
from paceline.algorithms.rloo import Rloo

ALONE = [
    Grpo(dual_clip=3.0),
    Grpo(correction=Correction(high=2.0)),
    Gspo(),
    Rloo(),
    ALGORITHMS["cispo"](),
    ALGORITHMS["ppo"](),
]


def _rows(seed: int, idle: set[int], num: int = 8, *, with_old: bool = True):
    rows = random_rows(seed, num)
    rng = np.random.default_rng(seed + 1)
    for index, row in enumerate(rows):
        if with_old:
            noise_T = 0.3 * rng.normal(size=len(row.tokens_T))
            row.old_logprobs_T = (-4 + noise_T) * row.mask_T
        if index in idle:
            row.advantages_T = np.zeros_like(row.advantages_T)
    return rows


class Everything:
    """An objective that asks for the backward of every row."""

    learns_by_advantage_alone = False

    def __init__(self, objective) -> None:
        self._objective = objective

    def __getattr__(self, name):
        return getattr(self._objective, name)


@pytest.mark.parametrize("algorithm", ALONE, ids=lambda a: a.kind)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), idle=st.sets(st.integers(0, 7)), with_old=st.booleans())
def test_loss_gradients_and_metrics_are_those_of_all_rows(algorithm, seed, idle, with_old):
    rows = _rows(seed, idle, with_old=with_old)
    metrics, expected = gradients(make_trainer(algorithm=Everything(algorithm)), rows)
    found_metrics, found = gradients(
        make_trainer(algorithm=algorithm, max_tokens_per_micro_batch=60), rows
    )
    assert found_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-9)
    assert_close(found, expected, 1e-6)


def test_idle_rows_take_part_in_no_backward(monkeypatch):
    seen = []
    forward = torch.Tensor.backward

    def backward(loss, *values, **named):
        seen.append(loss)
        return forward(loss, *values, **named)

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    rows = _rows(0, idle=set(range(1, 8)))
    gradients(make_trainer(algorithm=Grpo(), max_tokens_per_micro_batch=1), rows)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("algorithm", "is_alone"),
    [
        (Grpo(), True),
        (Grpo(kl_coef=0.1), False),
        (Grpo(entropy_coef=0.1), False),
        (Distill(reward_coef=1.0), False),
        (ALGORITHMS["sft"](), False),
        (ALGORITHMS["ppo"]().critic, False),
    ],
)
def test_other_terms_of_the_loss_keep_every_row(algorithm, is_alone):
    assert algorithm.learns_by_advantage_alone == is_alone


def test_a_step_without_any_gradient_moves_what_it_moved_before():
    """Weight decay and the moments of the steps before act on; the version rises."""
    batches = [_rows(0, set()), _rows(1, set(range(8))), _rows(2, {1, 3})]
    models = [model64(), model64()]
    objectives = [Grpo(), Everything(Grpo())]
    trainers = [
        make_trainer(model, algorithm=objective, weight_decay=0.1, lr=1e-2)
        for model, objective in zip(models, objectives, strict=True)
    ]
    reports = [train(trainer, batches) for trainer in trainers]
    assert [report.grad_norm == 0.0 for report in reports[0]] == [False, True, False]
    assert [r.version for r in reports[0]] == [1, 2, 3]
    assert_close(weights(models[0]), weights(models[1]), 1e-6)
    found, expected = map(moments_of, trainers)
    assert_close(found, expected, 1e-6)


def test_an_idle_row_that_is_not_finite_reaches_the_gradient(monkeypatch):
    """What is made of it is then as without idle rows: here, no row is left out."""
    seen = []
    forward = torch.Tensor.backward

    def backward(loss, *values, **named):
        seen.append(loss.item())
        return forward(loss, *values, **named)

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    rows = _rows(0, {2})
    rows[2].old_logprobs_T[rows[2].mask_T] = math.nan
    metrics, _ = gradients(make_trainer(algorithm=Grpo()), rows)
    assert math.isnan(metrics["train/loss"])
    assert [math.isnan(loss) for loss in seen] == [False, True]


def test_an_objective_with_terms_of_whole_rows_keeps_all_of_them():
    rows = _rows(0, {0, 1, 2})
    metrics, found = gradients(make_trainer(algorithm=PlainPolicyGradient()), rows)
    assert metrics["train/loss"] != 0.0
    assert any(tensor.any() for tensor in found.values())
