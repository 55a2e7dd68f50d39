"""KL estimators: values, gradients, and types too narrow for exp(20)."""

import pytest
import torch
from batches import inputs_of

from paceline.algorithms.grpo import Grpo
from paceline.algorithms.kl import KlEstimator, bounded_ratio, kl_estimate, log_ratio

ESTIMATORS: list[KlEstimator] = ["k1", "k2", "k3"]
NARROW = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("gap", [100.0, -100.0])
def test_case_14_a_huge_log_ratio_leaves_parameters_finite(
    estimator: KlEstimator, dtype: torch.dtype, gap: float
) -> None:
    weights = torch.tensor([-101.0, -0.5], requires_grad=True)
    inputs = inputs_of(weights.to(dtype), reference=[-101.0 + gap, -0.7])
    optimizer = torch.optim.AdamW([weights], lr=1e-3)
    output = Grpo(kl_coef=1.0, kl_estimator=estimator).loss(inputs)
    output.loss.backward()
    assert output.loss.isfinite()
    assert weights.grad is not None
    assert weights.grad.isfinite().all()
    optimizer.step()
    assert weights.isfinite().all()


def test_case_15_values_of_the_estimators() -> None:
    d = log_ratio(torch.tensor([-1.0]), torch.tensor([-1.5]))
    assert kl_estimate(d, "k1").item() == pytest.approx(0.5)
    assert kl_estimate(d, "k2").item() == pytest.approx(0.125)
    assert kl_estimate(d, "k3").item() == pytest.approx(0.106531, abs=5e-7)
    far = torch.tensor([-100.0], dtype=torch.float64)
    assert kl_estimate(far, "k3", limit=10).item() == pytest.approx(22015.47, abs=5e-3)


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.tensor([1.0, -0.5, 0.3, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.4, -1.0, 0.9], dtype=torch.float64).log_softmax(-1)
    return logits, reference


def exact_kl(logits_p: torch.Tensor, logits_q: torch.Tensor) -> torch.Tensor:
    log_p, log_q = logits_p.log_softmax(-1), logits_q.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_case_16_the_kl_in_the_loss_pulls_to_the_reference(estimator: KlEstimator) -> None:
    logits, reference = distributions()
    logprobs = logits.log_softmax(-1)
    # Every token of the vocabulary, weighted by its probability: sampling without its noise.
    inputs = inputs_of(logprobs, reference=reference, weights=logprobs.detach().exp())
    Grpo(kl_coef=1.0, kl_estimator=estimator).loss(inputs).loss.backward()
    gradient = logits.grad
    assert gradient is not None
    assert gradient.abs().max() > 1e-3
    before = exact_kl(logits, reference).item()
    after = exact_kl(logits.detach() - 0.1 * gradient, reference).item()
    assert after < before


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_mean_gradient_of_an_estimator_is_that_of_a_kl(estimator: KlEstimator) -> None:
    logits, reference = distributions()
    logprobs = logits.log_softmax(-1)
    loss = (logprobs.detach().exp() * kl_estimate(logprobs - reference, estimator)).sum()
    (found,) = torch.autograd.grad(loss, logits)
    exact = exact_kl(reference, logits) if estimator == "k3" else exact_kl(logits, reference)
    (expected,) = torch.autograd.grad(exact, logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_own_gradient_of_k1_would_move_nothing() -> None:
    logits, reference = distributions()
    logprobs = logits.log_softmax(-1)
    loss = (logprobs.detach().exp() * (logprobs - reference)).sum()
    (own,) = torch.autograd.grad(loss, logits)
    assert own.abs().max() < 1e-15


def test_k3_pulls_on_where_the_reference_finds_a_token_impossible() -> None:
    d = torch.tensor([50.0, 500.0], dtype=torch.float64, requires_grad=True)
    kl = kl_estimate(d, "k3")
    kl.sum().backward()
    assert kl.tolist() == [49.0, 499.0]
    assert d.grad is not None
    assert d.grad.tolist() == [1.0, 1.0]


def test_ratios_stop_at_the_bound_and_nan_stays_nan() -> None:
    d = torch.tensor([100.0, -100.0, 0.0, torch.inf, -torch.inf, torch.nan], dtype=torch.float64)
    ratio = bounded_ratio(d)
    top = torch.tensor(20.0, dtype=torch.float64).exp().item()
    assert ratio[:5].tolist() == pytest.approx([top, 1 / top, 1.0, top, 1 / top])
    assert ratio[5].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_widened_before_the_difference(dtype: torch.dtype) -> None:
    d = log_ratio(torch.tensor([-1.0], dtype=dtype), torch.tensor([-2.0], dtype=dtype))
    assert d.dtype == torch.float32
    assert log_ratio(d.double(), d.double()).dtype == torch.float64
