"""What a loss is given: the columns of a micro-batch's rows at their trained tokens.

Legend: N trained tokens of a micro-batch, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.algorithms.base import Algorithm, LossInputs
from paceline.errors import TrainerError
from paceline.trainers.layout import MicroBatch, trained_column
from paceline.types import Row

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.types import FloatArray


def loss_inputs(
    rows: Sequence[Row], micro: MicroBatch, logprobs_N: Tensor, entropy_N: Tensor
) -> LossInputs:
    """The columns of a micro-batch's rows, in the type and on the device of the log-probs."""

    def gather(values_T: list[FloatArray]) -> Tensor:
        return trained_column(rows, values_T, logprobs_N.device).to(logprobs_N.dtype)

    def optional(values_T: list[FloatArray | None]) -> Tensor | None:
        given = [v for v in values_T if v is not None]
        return gather(given) if given else None

    old_N = optional([row.old_logprobs_T for row in rows])
    return LossInputs(
        logprobs_N=logprobs_N,
        # Without old log-probs this is the first update of the rollout: a ratio of exactly 1.
        old_logprobs_N=logprobs_N.detach() if old_N is None else old_N,
        behaviour_logprobs_N=gather([row.behaviour_logprobs_T for row in rows]),
        advantages_N=gather([row.advantages_T for row in rows]),
        weights_N=gather([row.weights_T for row in rows]),
        rows_N=micro.rows_N,
        num_rows=len(rows),
        reference_logprobs_N=optional([row.reference_logprobs_T for row in rows]),
        entropy_N=entropy_N,
        old_values_N=optional([row.values_T for row in rows]),
        returns_N=optional([row.returns_T for row in rows]),
    )


def check_columns(rows: Sequence[Row], algorithm: Algorithm) -> None:
    """An optional column is there in all rows of a batch or in none."""
    for name in ("old_logprobs_T", "reference_logprobs_T", "values_T", "returns_T"):
        given = sum(getattr(row, name) is not None for row in rows)
        if given not in (0, len(rows)):
            raise TrainerError(f"{given} of {len(rows)} rows of the batch have {name}: all or none")
    if algorithm.needs_reference and any(row.reference_logprobs_T is None for row in rows):
        raise TrainerError(
            'the algorithm needs reference log-probs: call forward(rows, "reference") first'
        )
