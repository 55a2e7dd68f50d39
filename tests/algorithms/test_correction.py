"""Importance correction on numbers worked out by hand."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from batches import group_of, inputs_of, make_group, make_sample
from pydantic import ValidationError

from paceline.algorithms import ALGORITHMS
from paceline.algorithms.base import LossInputs
from paceline.algorithms.correction import Correction, correction_weights
from paceline.algorithms.grpo import Grpo
from paceline.data.packing import make_batches
from paceline.errors import TrainerError
from paceline.types import Status


def inputs(gaps: list[float], rows: list[int] | None = None) -> LossInputs:
    """Tokens whose log pi_old - log behaviour are the gaps; advantages 1."""
    logprobs = torch.full((len(gaps),), -1.0, dtype=torch.float64, requires_grad=True)
    found = inputs_of(logprobs, advantages=[1.0] * len(gaps))
    found.behaviour_logprobs_N = found.old_logprobs_N - torch.tensor(gaps, dtype=torch.float64)
    found.rows_N = torch.tensor(rows or [0] * len(gaps))
    found.num_rows = int(found.rows_N.max()) + 1
    return found


def means(found: dict[str, Any]) -> dict[str, float]:
    return {name: (total / weight).item() for name, (total, weight) in found.items()}


UP, DOWN = math.log(3.0), math.log(0.2)


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"high": 2.0}, [2.0, 0.2, 1.0]),
        ({"high": 2.0, "low": 0.5, "mode": "clip"}, [2.0, 0.5, 1.0]),
        ({"high": 2.0, "low": 0.5, "mode": "mask"}, [0.0, 0.0, 1.0]),
        ({"high": 5.0, "low": 0.1, "mode": "mask"}, [3.0, 0.2, 1.0]),
        ({"high": 5.0, "level": "sequence"}, [0.6, 0.6, 1.0]),
        ({"high": 1.0, "low": 0.7, "mode": "clip", "level": "sequence"}, [0.7, 0.7, 1.0]),
        ({"high": 1.0, "low": 0.7, "mode": "mask", "level": "sequence"}, [0.0, 0.0, 1.0]),
        ({"high": 5.0, "level": "geometric"}, [math.sqrt(0.6), math.sqrt(0.6), 1.0]),
        ({"high": 5.0, "veto": 0.25}, [0.0, 0.0, 1.0]),
        ({"high": 5.0, "veto": 0.1}, [3.0, 0.2, 1.0]),
    ],
    ids=str,
)
def test_weights(settings: dict[str, Any], weights: list[float]) -> None:
    """Two tokens of one row with ratios 3 and 0.2, and one row with ratio 1."""
    given = inputs([UP, DOWN, 0.0], [0, 0, 1])
    given.old_logprobs_N = given.old_logprobs_N.clone().requires_grad_()
    found, _ = correction_weights(given, Correction(**settings))
    assert found.tolist() == pytest.approx(weights)
    assert not found.requires_grad


def test_metrics_of_tokens() -> None:
    correction = Correction(high=2.0, low=0.5, mode="mask", veto=0.25)
    _, found = correction_weights(inputs([UP, DOWN, 0.0], [0, 0, 1]), correction)
    values = means(found)
    assert values["correction_bounded"] == pytest.approx(2 / 3)
    assert values["correction_weight"] == pytest.approx(1 / 3)
    assert values["effective_sample_share"] == pytest.approx(3 / (9 + 0.04 + 1))
    assert values["correction_vetoed"] == pytest.approx(1 / 2)


def test_metrics_of_sequences_count_each_row_once() -> None:
    correction = Correction(level="sequence", high=5.0, veto=1e-4)
    _, found = correction_weights(inputs([UP, DOWN, 0.0], [0, 0, 1]), correction)
    values = means(found)
    assert values["correction_weight"] == pytest.approx((0.6 + 1.0) / 2)
    assert values["effective_sample_share"] == pytest.approx(2 / (0.36 + 1.0))
    assert values["correction_bounded"] == 0.0
    assert values["correction_vetoed"] == 0.0


def test_equal_log_probs_change_nothing() -> None:
    plain, corrected = inputs([0.0, 0.0]), inputs([0.0, 0.0])
    correction = Correction(high=2.0, low=0.5, mode="mask", veto=1e-4)
    expected = Grpo().loss(plain).loss
    output = Grpo(correction=correction).loss(corrected)
    assert output.loss.item() == expected.item()
    assert means(output.means)["effective_sample_share"] == 1.0


def test_numerators_change_and_denominators_stay() -> None:
    """A masked token is still counted: the loss is not divided by what is left."""
    masked = inputs([UP, 0.0])
    output = Grpo(correction=Correction(high=2.0, low=0.5, mode="mask")).loss(masked)
    output.loss.backward()
    assert masked.logprobs_N.grad is not None
    assert masked.logprobs_N.grad.tolist() == [0.0, -0.5]
    assert output.loss.item() == -0.5


def test_kl_and_entropy_are_not_weighted() -> None:
    masked = inputs([UP])
    masked.reference_logprobs_N = torch.tensor([-1.5], dtype=torch.float64)
    correction = Correction(high=2.0, low=0.5, mode="mask")
    output = Grpo(correction=correction, kl_coef=0.1, kl_estimator="k1").loss(masked)
    assert output.loss.item() == pytest.approx(0.05)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_log_ratios_are_bounded_before_exp(level: str) -> None:
    far = inputs([200.0, 200.0])
    found, metrics = correction_weights(far, Correction(high=1e30, level=level))
    assert found.tolist() == pytest.approx([math.exp(20)] * 2)
    assert all(total.isfinite() for total, _ in metrics.values())


def test_a_nan_ratio_is_not_hidden() -> None:
    broken = inputs([math.nan, 0.0], [0, 1])
    correction = Correction(high=2.0, low=0.5, mode="mask", veto=1e-4)
    output = Grpo(correction=correction).loss(broken)
    assert output.loss.isnan()
    values = means(output.means)
    assert values["nonfinite_mismatch"] == 0.5
    assert values["correction_weight"] == 1.0
    assert values["effective_sample_share"] == 1.0


ROLLOUT = [kind for kind, make in ALGORITHMS.items() if make().learns_from_rollouts]


@pytest.mark.parametrize("kind", ROLLOUT)
def test_case_23_behaviour_log_probs_that_are_absent_are_refused_before_training(kind: str) -> None:
    make: Any = ALGORITHMS[kind]
    algorithm = make(correction=Correction(high=2.0))
    absent = [group_of([1.0, 0.0], logprobs=[0.0, 0.0, 0.0])]
    with pytest.raises(TrainerError, match=r"all 4 trained tokens are 0"):
        make_batches(absent, "policy", algorithm)
    assert make_batches(absent, "policy", make())
    assert make_batches([group_of([1.0, 0.0])], "policy", algorithm)


def test_case_23_behaviour_log_probs_of_another_length_are_refused_before_training() -> None:
    algorithm = Grpo(correction=Correction(high=2.0))
    short = [group_of([1.0, 0.0], logprobs=[0.0, -1.0])]
    with pytest.raises(TrainerError, match=r"'p', episode 0: 2 behaviour log-probs for 3 tokens"):
        make_batches(short, "policy", algorithm)
    with pytest.raises(ValueError, match="lengths differ"):
        make_batches(short, "policy", Grpo())
    broken = [group_of([1.0, 0.0], logprobs=[0.0, -1.0, math.nan])]
    with pytest.raises(TrainerError, match="not finite"):
        make_batches(broken, "policy", algorithm)


def test_samples_that_are_not_trained_need_no_log_probs() -> None:
    lost = make_sample(None, logprobs=[], status=Status.ABORTED, episode=1)
    masked = make_sample(0.0, [False] * 3, logprobs=[], episode=2)
    masked.versions = []
    groups = [make_group([[make_sample(1.0)], [lost], [masked]])]
    weights = Grpo(correction=Correction(high=2.0)).token_weights(groups, "policy")
    assert np.sum(weights[0]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "high"),
        ({"mode": "mask", "high": 2.0}, "needs low"),
        ({"mode": "clip", "high": 2.0}, "needs low"),
        ({"mode": "truncate", "high": 2.0, "low": 0.5}, "remove low"),
        ({"mode": "clip", "high": 2.0, "low": 1.5}, "low"),
        ({"high": 0.9}, "high"),
        ({"high": 2.0, "veto": 1.0}, "veto"),
        ({"high": 2.0, "level": "row"}, "level"),
    ],
)
def test_a_correction_with_missing_or_senseless_bounds_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        Correction(**settings)
