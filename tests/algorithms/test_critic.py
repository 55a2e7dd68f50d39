"""The loss of a critic on numbers worked out by hand."""

import pytest
import torch
from batches import inputs_of

from paceline.algorithms.base import LossInputs
from paceline.algorithms.critic import ValueObjective
from paceline.errors import TrainerError


def value_inputs(values: torch.Tensor, old: list[float], returns: list[float]) -> LossInputs:
    inputs = inputs_of(values.detach())
    inputs.values_N = values
    inputs.old_values_N = torch.tensor(old, dtype=values.dtype)
    inputs.returns_N = torch.tensor(returns, dtype=values.dtype)
    return inputs


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "slope"),
    [
        (2.0, 2.0, 1.0, 0.2, 0.5, 1.0),  # nothing moved
        (0.5, 0.0, 1.0, 0.2, 0.5 * 0.64, 0.0),  # moved to the target, further than the clip
        (0.5, 0.0, 1.0, None, 0.5 * 0.25, -0.5),
        (0.1, 0.0, 1.0, 0.2, 0.5 * 0.81, -0.9),  # within the clip
        (-0.5, 0.0, 1.0, 0.2, 0.5 * 2.25, -1.5),  # moved away: the plain term is the larger
    ],
)
def test_squared_error_with_clip(
    value: float, old: float, target: float, clip: float | None, loss: float, slope: float
) -> None:
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    output = ValueObjective(clip).loss(value_inputs(values, [old], [target]))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss)
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(slope)
    means = {name: (total / weight).item() for name, (total, weight) in output.means.items()}
    assert means["value"] == value
    assert means["return"] == target
    assert means["value_error"] == pytest.approx(abs(value - target))
    assert means.get("value_clip_fraction", 0.0) == (slope == 0)


def test_the_mean_is_that_of_the_weights() -> None:
    values = torch.tensor([1.0, 2.0], dtype=torch.float64)
    inputs = value_inputs(values, [1.0, 2.0], [0.0, 0.0])
    inputs.weights_N = torch.tensor([0.75, 0.25], dtype=torch.float64)
    assert ValueObjective(0.2).loss(inputs).loss.item() == pytest.approx((0.75 + 0.25 * 4) / 2)


@pytest.mark.parametrize("column", ["values_N", "old_values_N", "returns_N"])
def test_a_missing_column_is_named(column: str) -> None:
    inputs = value_inputs(torch.zeros(1, dtype=torch.float64), [0.0], [0.0])
    setattr(inputs, column, None)
    with pytest.raises(TrainerError, match=f"critic.* {column}"):
        ValueObjective(0.2).loss(inputs)


def test_case_12_a_micro_batch_without_tokens() -> None:
    values = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    output = ValueObjective(0.2).loss(value_inputs(values, [], []))
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert all(total == weight == 0 for total, weight in output.means.values())


def test_a_nan_value_is_counted_and_makes_the_loss_nan() -> None:
    values = torch.tensor([torch.nan, 1.0], dtype=torch.float64)
    output = ValueObjective(0.2).loss(value_inputs(values, [0.0, 0.0], [0.0, 0.0]))
    assert output.loss.isnan()
    total, weight = output.means["nonfinite_values"]
    assert (total / weight).item() == 0.5
