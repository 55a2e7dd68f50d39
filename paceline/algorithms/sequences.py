"""Sums and means over the trained tokens of each row of a micro-batch.

A row is one sample: an answer, or the part of an episode that its turns could be joined to.
Legend: N trained tokens of a micro-batch, R rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.algorithms.base import LossInputs


def row_sums(values_N: Tensor, inputs: LossInputs) -> Tensor:
    """Shape [R]; 0 for a row without trained tokens."""
    return values_N.new_zeros(inputs.num_rows).index_add(0, inputs.rows_N, values_N)


def row_lengths(inputs: LossInputs) -> Tensor:
    """Trained tokens of each row, shape [R], in the type of the weights."""
    return row_sums(inputs.weights_N.new_ones(inputs.weights_N.shape), inputs)


def over_rows(values_R: Tensor, inputs: LossInputs) -> Tensor:
    """Give each token the number of its row: [R] -> [N]."""
    return values_R.index_select(0, inputs.rows_N)


def row_means(values_N: Tensor, inputs: LossInputs) -> Tensor:
    """Mean over the trained tokens of the token's row, given to each token: [N] -> [N]."""
    means_R = row_sums(values_N, inputs) / row_lengths(inputs).clamp(min=1).to(values_N.dtype)
    return over_rows(means_R, inputs)
