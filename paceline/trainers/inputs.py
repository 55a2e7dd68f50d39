"""What a loss is given: the columns of a micro-batch's rows at their trained tokens.

Legend: N trained tokens of a micro-batch, T tokens of a row, K of a teacher's most likely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.algorithms.base import LossInputs, Objective
from paceline.errors import TrainerError
from paceline.trainers.base import Head
from paceline.trainers.layout import MicroBatch, trained_column
from paceline.types import Row

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.types import FloatArray


OPTIONAL = (
    "old_logprobs_T",
    "reference_logprobs_T",
    "values_T",
    "returns_T",
    "teacher_logprobs_T",
    "teacher_ids_TK",
    "teacher_top_logprobs_TK",
)


def policy_inputs(
    rows: Sequence[Row], micro: MicroBatch, logprobs_N: Tensor, entropy_N: Tensor
) -> LossInputs:
    """For the loss of a policy: the columns of the rows in the type and place of its log-probs."""
    inputs = _row_columns(rows, micro, logprobs_N)
    inputs.logprobs_N, inputs.entropy_N = logprobs_N, entropy_N
    if all(row.old_logprobs_T is None for row in rows):
        # This is the first update of the rollout: a ratio of exactly 1.
        inputs.old_logprobs_N = logprobs_N.detach()
    return inputs


def value_inputs(rows: Sequence[Row], micro: MicroBatch, values_N: Tensor) -> LossInputs:
    """For the loss of a critic, which is given no log-probs but those that the engine reported."""
    inputs = _row_columns(rows, micro, values_N)
    inputs.values_N = values_N
    return inputs


def teacher_ids(rows: Sequence[Row], micro: MicroBatch) -> Tensor | None:
    """The tokens that a teacher finds most likely at each position, int64 [N, K]; None without."""
    ids_TK: list[Any] = [row.teacher_ids_TK for row in rows if row.teacher_ids_TK is not None]
    return trained_column(rows, ids_TK, micro.rows_N.device).long() if ids_TK else None


def _row_columns(rows: Sequence[Row], micro: MicroBatch, like_N: Tensor) -> LossInputs:
    """What the rows hold, in the type and on the device of `like_N`.

    Log-probs that are not known are those that the engine reported.
    """

    def gather(values_T: list[FloatArray]) -> Tensor:
        return trained_column(rows, values_T, like_N.device).to(like_N.dtype)

    def optional(values_T: list[FloatArray | None]) -> Tensor | None:
        given = [v for v in values_T if v is not None]
        return gather(given) if given else None

    behaviour_N = gather([row.behaviour_logprobs_T for row in rows])
    old_N = optional([row.old_logprobs_T for row in rows])
    return LossInputs(
        logprobs_N=behaviour_N,
        old_logprobs_N=behaviour_N if old_N is None else old_N,
        behaviour_logprobs_N=behaviour_N,
        advantages_N=gather([row.advantages_T for row in rows]),
        weights_N=gather([row.weights_T for row in rows]),
        rows_N=micro.rows_N,
        num_rows=len(rows),
        reference_logprobs_N=optional([row.reference_logprobs_T for row in rows]),
        old_values_N=optional([row.values_T for row in rows]),
        returns_N=optional([row.returns_T for row in rows]),
        teacher_logprobs_N=optional([row.teacher_logprobs_T for row in rows]),
        teacher_top_logprobs_NK=optional([row.teacher_top_logprobs_TK for row in rows]),
    )


def check_columns(rows: Sequence[Row], objective: Objective, head: Head) -> None:
    """An optional column is there in all rows of a batch or in none, and in all if it is needed."""
    for name in OPTIONAL:
        given = sum(getattr(row, name) is not None for row in rows)
        if given not in (0, len(rows)):
            raise TrainerError(f"{given} of {len(rows)} rows of the batch have {name}: all or none")
    if objective.needs_reference and any(row.reference_logprobs_T is None for row in rows):
        raise TrainerError(
            'the algorithm needs reference log-probs: call forward(rows, "reference") first'
        )
    if objective.needs_teacher:
        _check_teacher(rows, objective.teacher_top_k)
    is_lacking = any(row.values_T is None or row.returns_T is None for row in rows)
    if head == "values" and is_lacking:
        raise TrainerError(
            "a critic learns from rows with values and returns: write what "
            'forward(rows, "values") and the algorithm\'s `credit` gave into them first'
        )


def _check_teacher(rows: Sequence[Row], top_k: int) -> None:
    """What a teacher says of the sampled tokens, or of as many of its own as the loss wants."""
    if top_k == 0 and any(row.teacher_logprobs_T is None for row in rows):
        raise TrainerError(
            "the algorithm needs a teacher's log-probs: let a teacher grade the rows"
        )
    for row in rows if top_k else ():
        for column_TK in (row.teacher_ids_TK, row.teacher_top_logprobs_TK):
            if column_TK is None or column_TK.shape != (len(row.tokens_T), top_k):
                found = "none" if column_TK is None else f"a column of shape {column_TK.shape}"
                raise TrainerError(
                    f"the algorithm compares the {top_k} most likely tokens of a teacher, and a "
                    f"row of {len(row.tokens_T)} tokens has {found}: let a teacher grade the rows "
                    f"with top_k = {top_k}"
                )
