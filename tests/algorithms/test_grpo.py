"""GRPO's loss on numbers worked out by hand."""

import math

import pytest
import torch
from batches import inputs_of
from pydantic import ValidationError

from paceline.algorithms.base import LossOutput
from paceline.algorithms.grpo import Grpo
from paceline.errors import TrainerError
from paceline.observe.metrics import Metrics


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def values_of(output: LossOutput) -> dict[str, float]:
    metrics = Metrics()
    for name, (total, weight) in output.means.items():
        assert not total.requires_grad
        assert total.shape == weight.shape == ()
        metrics.mean(name, total.item(), weight.item())
    return metrics.values()


def test_case_20_the_first_update_has_ratio_one_and_clips_nothing() -> None:
    logprobs = f64(-0.1, -2.3, -17.0)
    output = Grpo().loss(inputs_of(logprobs, advantages=[1.0, -1.0, 0.5]))
    values = values_of(output)
    assert values["ratio"] == 1.0
    assert values["clip_fraction"] == 0.0
    assert values["approx_kl"] == 0.0
    assert values["mismatch_abs"] == 0.0
    output.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1 / 3, 1 / 3, -0.5 / 3])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad", "clipped"),
    [
        (1.5, 1.0, -1.28, 0.0, "high"),
        (1.5, -1.0, 1.5, 1.5, None),
        (0.5, 1.0, -0.5, -0.5, None),
        (0.5, -1.0, 0.8, 0.0, "low"),
        (1.1, 2.0, -2.2, -2.2, None),
        (0.9, -2.0, 1.8, 1.8, None),
        (5.0, 0.0, 0.0, 0.0, None),
    ],
)
def test_clip(
    ratio: float, advantage: float, loss: float, grad: float, clipped: str | None
) -> None:
    logprobs = f64(math.log(ratio) - 1.0)
    output = Grpo(clip_low=0.2, clip_high=0.28).loss(
        inputs_of(logprobs, old=[-1.0], advantages=[advantage])
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(grad)
    values = values_of(output)
    assert values["clip_fraction"] == (clipped is not None)
    assert values["clip_fraction_low"] == (clipped == "low")
    assert values["clip_fraction_high"] == (clipped == "high")
    assert values["ratio"] == pytest.approx(ratio)
    assert values["approx_kl"] == pytest.approx(ratio - 1 - math.log(ratio))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad"),
    [(4.0, -1.0, 3.0, 0.0), (2.0, -1.0, 2.0, 2.0), (4.0, 1.0, -1.2, 0.0)],
)
def test_dual_clip_bounds_negative_advantages_only(
    ratio: float, advantage: float, loss: float, grad: float
) -> None:
    logprobs = f64(math.log(ratio))
    output = Grpo(dual_clip=3.0).loss(inputs_of(logprobs, old=[0.0], advantages=[advantage]))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(grad)
    assert values_of(output)["dual_clip_fraction"] == (ratio == 4.0 and advantage < 0)


def test_policy_loss_is_the_loss_without_its_other_terms() -> None:
    inputs = inputs_of(
        f64(-1.0, -1.0), advantages=[1.0, 3.0], weights=[0.2, 0.3], reference=[-3.0, -2.0]
    )
    output = Grpo(kl_coef=0.5).loss(inputs)
    assert values_of(output)["policy_loss"] == pytest.approx(-(0.2 * 1 + 0.3 * 3) / 0.5)
    assert output.loss.item() != pytest.approx(-1.1)


def test_log_ratios_are_bounded_before_exp() -> None:
    logprobs = torch.tensor([-0.5], requires_grad=True)
    output = Grpo().loss(inputs_of(logprobs, old=[-200.5], advantages=[-1.0]))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(math.exp(20), rel=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0.0


def test_a_nan_log_ratio_is_counted_and_makes_the_loss_nan() -> None:
    logprobs = f64(-1.0, -1.0, -1.0, -1.0)
    old = [-1.0, math.nan, -1.0, -1.0]
    output = Grpo().loss(inputs_of(logprobs, old=old, advantages=[1.0] * 4))
    assert output.loss.isnan()
    values = values_of(output)
    assert values["nonfinite_log_ratio"] == 0.25
    assert values["ratio"] == 1.0
    assert output.means["ratio"][1] == 3
    assert values["approx_kl"] == 0.0


@pytest.mark.parametrize("kl_estimator", ["k1", "k2", "k3"])
def test_a_nan_reference_is_counted_and_makes_the_loss_nan(kl_estimator: str) -> None:
    reference = [-1.0, math.nan]
    output = Grpo(kl_coef=0.1, kl_estimator=kl_estimator).loss(
        inputs_of(f64(-1.0, -1.0), reference=reference)
    )
    assert output.loss.isnan()
    values = values_of(output)
    assert values["nonfinite_reference_log_ratio"] == 0.5
    assert values["nonfinite_log_ratio"] == 0.0
    assert values["kl_reference"] == 0.0


def test_mismatch_of_engine_and_trainer_is_measured_and_not_trained_on() -> None:
    inputs = inputs_of(f64(-1.0, -2.0), advantages=[1.0, 1.0])
    expected = Grpo().loss(inputs).loss.item()
    inputs.behaviour_logprobs_N = inputs.old_logprobs_N + torch.tensor([0.5, -0.1])
    output = Grpo().loss(inputs)
    assert output.loss.item() == expected
    values = values_of(output)
    assert values["mismatch_abs"] == pytest.approx(0.3)
    k3 = [math.exp(-0.5) - 1 + 0.5, math.exp(0.1) - 1 - 0.1]
    assert values["mismatch_kl"] == pytest.approx(sum(k3) / 2)
    assert values["nonfinite_mismatch"] == 0.0


def test_kl_and_entropy_terms() -> None:
    entropy = f64(0.4, 0.8)
    inputs = inputs_of(f64(-1.0, -1.0), reference=[-1.5, -1.0], entropy=entropy)
    output = Grpo(kl_coef=0.1, entropy_coef=0.01).loss(inputs)
    k3 = math.exp(-0.5) - 1 + 0.5
    assert output.loss.item() == pytest.approx(0.1 * k3 / 2 - 0.01 * 0.6)
    output.loss.backward()
    assert entropy.grad is not None
    assert entropy.grad.tolist() == [-0.005, -0.005]
    values = values_of(output)
    assert values["kl_reference"] == pytest.approx(k3 / 2)
    assert values["entropy"] == pytest.approx(0.6)
    assert values["policy_loss"] == 0.0


def test_case_27_without_variance_the_kl_still_pulls() -> None:
    logprobs = f64(-1.0, -2.0)
    Grpo().loss(inputs_of(logprobs)).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0]
    logprobs = f64(-1.0, -2.0)
    Grpo(kl_coef=0.1).loss(inputs_of(logprobs, reference=[-2.0, -1.0])).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.abs().min() > 0


def test_case_12_a_micro_batch_without_tokens() -> None:
    logprobs = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    empty = logprobs[:0]
    inputs = inputs_of(empty, reference=[], entropy=empty)
    output = Grpo(kl_coef=0.1, entropy_coef=0.1, dual_clip=3.0).loss(inputs)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0, 0.0]
    assert all(total == weight == 0 for total, weight in output.means.values())
    assert values_of(output) == {}


def test_needs() -> None:
    assert not Grpo().needs_reference
    assert Grpo(kl_coef=0.01).needs_reference
    assert not Grpo().needs_entropy_gradient
    assert Grpo(entropy_coef=0.01).needs_entropy_gradient
    assert Grpo().critic is None
    assert Grpo().needs_reward
    assert not Grpo().needs_old_logprobs
    assert not Grpo().needs_teacher
    assert Grpo().learns_from_rollouts


@pytest.mark.parametrize(
    ("algorithm", "column"),
    [(Grpo(kl_coef=0.1), "reference_logprobs_N"), (Grpo(entropy_coef=0.1), "entropy_N")],
)
def test_a_missing_column_is_named(algorithm: Grpo, column: str) -> None:
    with pytest.raises(TrainerError, match=column):
        algorithm.loss(inputs_of(f64(-1.0)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_mean": "constant"}, "constant_tokens"),
        ({"constant_tokens": 10}, "loss_mean"),
        ({"loss_mean": "mean"}, "loss_mean"),
        ({"clip_low": -0.1}, "clip_low"),
        ({"clip_low": 1.1}, "clip_low"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"kl_coef": -0.1}, "kl_coef"),
        ({"kl_coef": "0.1"}, "kl_coef"),
        ({"kl_estimator": "k4"}, "kl_estimator"),
        ({"clip": 0.2}, "clip"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Grpo(**settings)
