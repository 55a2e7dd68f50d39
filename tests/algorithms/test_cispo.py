"""CISPO: the weight is held, the gradient stays."""

import math

import pytest
import torch
from batches import inputs_of

from paceline.algorithms.cispo import Cispo
from paceline.observe.metrics import Metrics


@pytest.mark.parametrize(
    ("ratio", "advantage", "held", "clipped"),
    [
        (1.0, 1.0, 1.0, None),
        (3.0, 1.0, 1.5, "high"),
        (3.0, -1.0, 1.5, "high"),
        (0.2, 1.0, 0.7, "low"),
        (0.2, -2.0, 0.7, "low"),
    ],
)
def test_the_weight_is_held_and_the_gradient_is_not(
    ratio: float, advantage: float, held: float, clipped: str | None
) -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    inputs = inputs_of(logprobs, old=[-1.0 - math.log(ratio)], advantages=[advantage])
    output = Cispo(clip_low=0.3, clip_high=0.5).loss(inputs)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(held * advantage)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-held * advantage)
    metrics = Metrics()
    for name, (total, weight) in output.means.items():
        metrics.mean(name, total.item(), weight.item())
    values = metrics.values()
    assert values["clip_fraction"] == (clipped is not None)
    assert values["clip_fraction_low"] == (clipped == "low")
    assert values["clip_fraction_high"] == (clipped == "high")


def test_without_a_lower_bound_a_small_weight_stays_small() -> None:
    logprobs = torch.tensor([-3.0], dtype=torch.float64, requires_grad=True)
    Cispo().loss(inputs_of(logprobs, old=[-1.0], advantages=[1.0])).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-math.exp(-2))


def test_case_20_the_first_update_is_the_policy_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    Cispo().loss(inputs_of(logprobs, advantages=[1.0, -3.0])).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, 1.5]


def test_a_nan_log_ratio_makes_the_loss_nan() -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    output = Cispo().loss(inputs_of(logprobs, old=[-1.0, math.nan], advantages=[1.0, 1.0]))
    assert output.loss.isnan()
    total, weight = output.means["nonfinite_log_ratio"]
    assert (total / weight).item() == 0.5
