"""Every algorithm and every mean through the trainer: no saving of work changes a number.

Compared are micro-batches, packing, order, a split over processes, shared prefixes and rows left
out of the backward, each with one padded micro-batch of whole rows that all have a backward.

The model is float64 throughout (no part of GPT-2 computes in float32), so that what is left over
is rounding of the last bits.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_settings import MEANS, VARIANTS, make_algorithm
from architectures import VOCAB, small_model
from batches import random_rollout, score_rollout
from trainer_rows import assert_close, gradients, make_trainer

from paceline.algorithms.base import Algorithm, Objective
from paceline.algorithms.sft import Sft
from paceline.trainers.single import SingleTrainer
from paceline.trainers.values import ValueModel
from paceline.types import Group, Row

CLOSE = 1e-9
ALGORITHMS: dict[tuple[str, str], Algorithm] = {
    (name, mean): make_algorithm(name, mean) for name in VARIANTS for mean in MEANS
}
ALGORITHMS["sft", "token"], ALGORITHMS["sft", "episode"] = Sft(), Sft(loss_mean="episode")
CASES = [
    pytest.param(
        algorithm, seed, id=f"{name}, {mean}", marks=[pytest.mark.slow] * (mean != "token")
    )
    for seed, ((name, mean), algorithm) in enumerate(ALGORITHMS.items())
]
"""Each with a rollout of its own."""
SAVINGS: list[dict[str, Any]] = [
    {"share_prefix": True},
    {"share_prefix": True, "max_tokens_per_micro_batch": 60, "logprob_chunk_tokens": 20},
    {"share_prefix": False, "max_tokens_per_micro_batch": 60, "layout": "packed"},
]


class Everything:
    """An objective that asks for the backward of every row."""

    learns_by_advantage_alone = False

    def __init__(self, objective: Objective) -> None:
        self._objective = objective

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)


@pytest.fixture(autouse=True)
def _trees_wherever_they_are_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.trainers.layout.MAX_NODE_SHARE", 1.0)


def related_rollout(seed: int) -> list[Group]:
    """Answers of a group that begin with its prompt, part early or late, or never."""
    rng = np.random.default_rng(seed)
    groups = random_rollout(rng, num_groups=4)
    for group in groups:
        prompt = rng.integers(3, VOCAB, rng.integers(1, 9)).tolist()
        for sample in group.samples():
            num = len(prompt)
            # Two tokens alone, so that many of them are alike.
            sample.tokens = prompt + rng.integers(3, 5, len(sample.tokens)).tolist()
            sample.mask = [False] * num + sample.mask
            sample.logprobs = [0.0] * num + sample.logprobs
            sample.versions = [-1] * num + sample.versions
    return groups


@functools.cache
def model_of(head: str) -> Any:
    """Nothing here moves its weights."""
    model = small_model("gpt2")
    if head == "policy":
        return model
    critic = ValueModel(model.base_model).double()
    with torch.no_grad():
        critic.head.weight.fill_(0.1)
    return critic


def trainer_of(head: str, objective: Any, **named: Any) -> SingleTrainer:
    reference = small_model("gpt2") if objective.needs_reference else None
    return make_trainer(model_of(head), objective, reference=reference, **named)


def rows_of(algorithm: Algorithm, seed: int) -> list[Row]:
    """Rows with all columns, as a rollout of this algorithm leaves them."""
    scored = score_rollout(related_rollout(seed), algorithm, seed)
    for one in scored:
        if not algorithm.teacher_top_k:
            one.row.teacher_ids_TK = one.row.teacher_top_logprobs_TK = None
    return [one.row for one in scored]


@pytest.mark.parametrize(("algorithm", "seed"), CASES)
def test_cases_3_and_13_loss_gradients_and_metrics(algorithm: Algorithm, seed: int) -> None:
    rows = rows_of(algorithm, seed)
    compare("policy", algorithm, rows)
    if algorithm.critic is not None:
        compare("values", algorithm.critic, rows)


def compare(head: str, objective: Objective, rows: list[Row]) -> None:
    plain = trainer_of(head, Everything(objective), share_prefix=False)
    metrics, expected = gradients(plain, rows)
    assert any(float(gradient.abs().max()) > 0 for gradient in expected.values())
    for saving in SAVINGS:
        trainer = trainer_of(head, objective, **saving)
        assert trainer._core.trained.shares_prefixes == saving["share_prefix"]
        found_metrics, found = gradients(trainer, rows[::-1])
        assert found_metrics == pytest.approx(metrics, rel=CLOSE, abs=1e-12), saving
        assert_close(found, expected, CLOSE)
    first, second = (gradients(trainer, part)[1] for part in (rows[::2], rows[1::2]))
    assert_close({name: first[name] + second[name] for name in expected}, expected, CLOSE)
