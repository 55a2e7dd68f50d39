"""On-policy distillation: gradients of exact divergences, and numbers worked out by hand."""

import math

import pytest
import torch
from batches import group_of, inputs_of
from pydantic import ValidationError

from paceline.algorithms.base import LossInputs
from paceline.algorithms.correction import Correction
from paceline.algorithms.distill import Distill, top_k_kl
from paceline.errors import TrainerError


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def with_teacher(inputs: LossInputs, teacher: list[float]) -> LossInputs:
    inputs.teacher_logprobs_N = torch.tensor(teacher, dtype=torch.float64)
    return inputs


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    logits = f64(1.0, -0.5, 0.3, 0.0, -2.0)
    teacher = torch.tensor([0.2, 0.4, -1.0, 0.9, 0.1], dtype=torch.float64).log_softmax(-1)
    return logits, teacher


def test_a_token_that_the_teacher_likes_more_is_made_likelier() -> None:
    logprobs = f64(-1.0, -1.0)
    output = Distill().loss(with_teacher(inputs_of(logprobs), [-0.5, -3.0]))
    output.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.25, 1.0]
    assert output.loss.item() == pytest.approx((-0.5 + 2.0) / 2)
    total, weight = output.means["kl_teacher"]
    assert (total / weight).item() == pytest.approx(0.75)


def test_the_mean_gradient_is_that_of_the_reverse_kl() -> None:
    logits, teacher = distributions()
    logprobs = logits.log_softmax(-1)
    inputs = inputs_of(logprobs, weights=logprobs.detach().exp())
    loss = Distill().loss(with_teacher(inputs, teacher.tolist())).loss
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    exact = (logprobs.exp() * (logprobs - teacher)).sum()
    (expected,) = torch.autograd.grad(exact, logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_teacher_is_followed_where_it_stands_now() -> None:
    """In a later update the gap is that of the current weights, weighted by the ratio."""
    logprobs = f64(-0.9)
    Distill().loss(with_teacher(inputs_of(logprobs, old=[-1.0]), [-0.5])).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-0.4 * math.exp(0.1))


def test_case_14_a_token_that_the_teacher_finds_impossible_stays_finite() -> None:
    logprobs = f64(-1.0, -1.0)
    output = Distill().loss(with_teacher(inputs_of(logprobs), [-math.inf, -1.0]))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(10.0)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [10.0, 0.0]
    total, weight = output.means["nonfinite_teacher"]
    assert (total / weight).item() == 0.5


def test_a_nan_teacher_makes_the_loss_nan() -> None:
    output = Distill().loss(with_teacher(inputs_of(f64(-1.0, -1.0)), [math.nan, -1.0]))
    assert output.loss.isnan()


@pytest.mark.parametrize("weights", ["student", "teacher"])
def test_the_top_k_of_all_tokens_are_the_exact_kl_with_its_gradient(weights: str) -> None:
    logits, teacher = distributions()
    student = logits.log_softmax(-1)
    p, q = (student, teacher) if weights == "student" else (teacher, student)
    exact = (p.exp() * (p - q)).sum()
    for kept in (5, 4):  # with one left out, it is the rest
        found = top_k_kl(student[None, :kept], teacher[None, :kept], weights)
        assert found.item() == pytest.approx(exact.item(), rel=1e-5)
        (slope,) = torch.autograd.grad(found.sum(), logits, retain_graph=True)
        (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
        torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weights", ["student", "teacher"])
def test_joining_the_rest_never_raises_the_kl_nor_makes_it_negative(weights: str) -> None:
    logits, teacher = distributions()
    student = logits.log_softmax(-1)
    found = [
        top_k_kl(student[None, :kept], teacher[None, :kept], weights).item() for kept in range(1, 6)
    ]
    assert found == sorted(found)
    assert found[0] > 0
    assert top_k_kl(student[None, :2], student[None, :2], weights).item() == 0.0


@pytest.mark.parametrize("weights", ["student", "teacher"])
def test_a_student_whose_probability_lies_elsewhere_is_not_at_rest(weights: str) -> None:
    """On the two tokens alone both distributions look the same: 1 to 1."""
    student, teacher = f64(-5.0, -5.0), torch.tensor([-0.7, -0.7], dtype=torch.float64)
    kl = top_k_kl(student[None], teacher[None], weights)
    kl.sum().backward()
    assert kl.item() > 1
    assert student.grad is not None
    assert (student.grad < 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", ["student", "teacher"])
def test_a_certain_distribution_is_finite(weights: str, dtype: torch.dtype) -> None:
    student = torch.tensor([[0.0, -90.0]], dtype=dtype, requires_grad=True)
    kl = top_k_kl(student, torch.tensor([[-90.0, 0.0]], dtype=dtype), weights)
    kl.sum().backward()
    assert kl.isfinite().all()
    assert student.grad is not None
    assert student.grad.isfinite().all()


def test_top_k_needs_no_sampled_token() -> None:
    inputs = inputs_of(f64(-1.0))
    inputs.top_logprobs_NK = f64(-1.0, -2.0)[None]
    inputs.teacher_top_logprobs_NK = torch.tensor([[-2.0, -1.0]], dtype=torch.float64)
    output = Distill(top_k=2).loss(inputs)
    p, q = [math.exp(-1), math.exp(-2)], [math.exp(-2), math.exp(-1)]
    kl = p[0] - p[1]  # the rest is equal
    assert sum(p) == pytest.approx(sum(q))
    assert output.loss.item() == pytest.approx(kl)
    total, weight = output.means["kl_teacher"]
    assert (total / weight).item() == pytest.approx(kl)


def test_rewards_may_take_part() -> None:
    assert not Distill().needs_reward
    assert Distill().min_group_size == 1
    mixed = Distill(reward_coef=0.5, normalize="none")
    assert mixed.needs_reward
    assert mixed.min_group_size == 2
    groups = [group_of([1.0, 0.0])]
    assert mixed.credit(groups, "policy").advantages == [[0, 0.25, 0.25], [0, -0.25, -0.25]]
    assert Distill().credit([group_of([0.0])], "policy").advantages == [[0, 0, 0]]
    logprobs = f64(-1.0)
    inputs = with_teacher(inputs_of(logprobs, advantages=[0.25]), [-1.5])
    mixed.loss(inputs).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-(0.25 - 0.5))


def test_what_it_asks_for() -> None:
    assert Distill().needs_teacher
    assert Distill().teacher_top_k == 0
    assert Distill(top_k=16).teacher_top_k == 16
    with pytest.raises(TrainerError, match="teacher_logprobs_N"):
        Distill().loss(inputs_of(f64(-1.0)))
    with pytest.raises(TrainerError, match="top_logprobs_NK"):
        Distill(top_k=2).loss(inputs_of(f64(-1.0)))
    with pytest.raises(ValidationError, match="remove correction"):
        Distill(top_k=2, correction=Correction(high=2.0))
