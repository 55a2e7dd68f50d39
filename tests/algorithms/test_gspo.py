"""GSPO: one ratio for a whole answer."""

import math

import pytest
import torch
from batches import inputs_of

from paceline.algorithms.base import LossInputs
from paceline.algorithms.gspo import Gspo


def inputs(
    log_ratios: list[float], rows: list[int], advantages: list[float]
) -> tuple[torch.Tensor, LossInputs]:
    logprobs = torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True)
    found = inputs_of(logprobs, old=[0.0] * len(log_ratios), advantages=advantages)
    found.rows_N = torch.tensor(rows)
    found.num_rows = max(rows) + 1
    return logprobs, found


def test_case_18_the_mean_is_taken_before_the_bound() -> None:
    _, one = inputs([100.0, -100.0], [0, 0], [1.0, 1.0])
    output = Gspo().loss(one)
    total, weight = output.means["ratio"]
    assert (total / weight).item() == 1.0
    assert output.loss.item() == -1.0


def test_case_18_a_huge_mean_has_a_finite_loss_and_gradient() -> None:
    logprobs, one = inputs([100.0, 100.0], [0, 0], [-1.0, -1.0])
    output = Gspo().loss(one)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(math.exp(20))
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


def test_each_row_has_the_geometric_mean_of_its_own_ratios() -> None:
    """Rows 0 and 2: means 0.1 and -0.2; row 1 has no trained token."""
    logprobs, three = inputs([0.3, -0.1, -0.2], [0, 0, 2], [1.0, 1.0, 2.0])
    output = Gspo(clip_low=0.5, clip_high=0.5).loss(three)
    first, last = math.exp(0.1), math.exp(-0.2)
    assert output.loss.item() == pytest.approx(-(2 * first + 2 * last) / 3)
    output.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-first / 3, -first / 3, -2 * last / 3])


@pytest.mark.parametrize(
    ("gap", "advantage", "is_free"),
    [(5e-4, 1.0, False), (3.5e-4, 1.0, True), (-3.5e-4, -1.0, False), (-2.5e-4, -1.0, True)],
)
def test_the_clip_of_the_paper_is_narrow(gap: float, advantage: float, is_free: bool) -> None:
    logprobs, one = inputs([gap], [0], [advantage])
    Gspo().loss(one).loss.backward()
    assert logprobs.grad is not None
    assert (logprobs.grad.item() != 0) == is_free


def test_the_mean_of_the_paper_gives_each_answer_the_same_say() -> None:
    assert Gspo().loss_mean == "episode"
    assert Gspo().min_group_size == 2
