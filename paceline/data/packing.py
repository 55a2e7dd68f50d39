"""From groups to rows, from rows to optimizer steps, from an optimizer step to micro-batches.

One order serves every algorithm:

    batches = make_batches(groups, policy, algorithm, num_updates)     tokens, masks, weights
    rows    = all rows of the batches              the trainer scores them: old, reference, values
    credit  = algorithm.credit(groups, policy, read_scores(groups, policy, rows))
    assign_credit(groups, policy, rows, credit)                        advantages, returns

A critic's values, and what it expects after the last token where the algorithm asks for that:

    values = critic.forward([with_final_position(row) for row in rows], "values")
    for row, values_T in zip(rows, values): take_values(row, values_T)

A sample becomes a row if its episode can be trained on and it has a trained token; the others
would cost a forward pass and change nothing. So a batch may have no rows: its loss is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from paceline.algorithms.base import Algorithm, Credit, Scores
from paceline.types import Batch, Group, Row, Sample

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from paceline.types import FloatArray


def split_updates(groups: Sequence[Group], num_updates: int) -> list[list[Group]]:
    """Whole groups in their order, in `num_updates` parts whose sizes differ by at most one.

    Fewer groups than updates give one part a group: no optimizer step is made of nothing.
    """
    if num_updates < 1:
        raise ValueError(f"a rollout is split into at least 1 update, found {num_updates}")
    num_parts = min(num_updates, len(groups))
    bounds = [len(groups) * i // num_parts for i in range(num_parts + 1)] if num_parts else [0]
    return [list(groups[a:b]) for a, b in pairwise(bounds)]


def make_batches(
    groups: Sequence[Group],
    policy: str,
    algorithm: Algorithm,
    num_updates: int = 1,
    dtype: DTypeLike = np.float32,
) -> list[Batch]:
    """One batch an optimizer step, each with its own denominators; advantages are still 0."""
    return [
        Batch(
            policy,
            make_rows(part, policy, weights=algorithm.token_weights(part, policy), dtype=dtype),
        )
        for part in split_updates(groups, num_updates)
    ]


def make_rows(
    groups: Sequence[Group],
    policy: str,
    credit: Credit | None = None,
    weights: Sequence[Sequence[float]] | None = None,
    dtype: DTypeLike = np.float32,
) -> list[Row]:
    """The rows of one policy, in group order.

    credit, weights: made of the same groups; absent: 0 everywhere. dtype: of the float columns.
    Raises ValueError if the columns of a sample, or those given, do not fit each other.
    """
    rows = [
        _make_row(sample, None if weights is None else weights[index], dtype)
        for index, sample in _samples_with_row(groups, policy)
    ]
    if credit is not None:
        assign_credit(groups, policy, rows, credit)
    return rows


def assign_credit(
    groups: Sequence[Group], policy: str, rows: Sequence[Row], credit: Credit
) -> None:
    """Write advantages, and returns if there are any, into the rows made of these groups."""
    for row, (index, sample) in zip(rows, _samples_with_row(groups, policy), strict=True):
        dtype = row.weights_T.dtype
        row.advantages_T = _column(sample, credit.advantages[index], dtype)
        if credit.returns is not None:
            row.returns_T = _column(sample, credit.returns[index], dtype)


def read_scores(groups: Sequence[Group], policy: str, rows: Sequence[Row]) -> Scores:
    """What the trainer wrote into the rows, per sample of the policy.

    0.0 for samples without row; None for a column that some row lacks.
    """
    samples = list(samples_of(groups, policy))
    indices = [index for index, _ in _samples_with_row(groups, policy)]

    def column(of_rows: list[FloatArray | None]) -> list[list[float]] | None:
        if any(found_T is None for found_T in of_rows):
            return None
        scores = [[0.0] * len(sample.tokens) for sample in samples]
        for index, found_T in zip(indices, of_rows, strict=True):
            if found_T is not None:
                scores[index] = found_T.tolist()
        return scores

    final_values: list[float] | None = None
    if all(row.final_value is not None for row in rows):
        final_values = [0.0] * len(samples)
        for index, row in zip(indices, rows, strict=True):
            final_values[index] = row.final_value or 0.0
    return Scores(
        old_logprobs=column([row.old_logprobs_T for row in rows]),
        reference_logprobs=column([row.reference_logprobs_T for row in rows]),
        values=column([row.values_T for row in rows]),
        final_values=final_values,
    )


def with_final_position(row: Row) -> Row:
    """The row with one more trained position at its end, for a critic to say what it expects there.

    The token there is never read: what is said of a position is made of the tokens before it.
    """
    nothing = np.zeros(1, row.weights_T.dtype)
    return Row(
        tokens_T=np.append(row.tokens_T, 0),
        mask_T=np.append(row.mask_T, True),
        weights_T=np.append(row.weights_T, nothing),
        advantages_T=np.append(row.advantages_T, nothing),
        behaviour_logprobs_T=np.append(row.behaviour_logprobs_T, nothing),
        temperature=row.temperature,
        episode=row.episode,
    )


def take_values(row: Row, values_T: FloatArray) -> None:
    """Write a critic's values into the row: one for each token, then perhaps one for the end.

    Raises ValueError if they are fewer or more.
    """
    length = len(row.tokens_T)
    if len(values_T) not in (length, length + 1):
        raise ValueError(f"{len(values_T)} values for a row of {length} tokens")
    row.values_T = values_T[:length]
    row.final_value = float(values_T[length]) if len(values_T) > length else None


def samples_of(groups: Sequence[Group], policy: str) -> Iterator[Sample]:
    """All samples of the policy, in the order of credit and weights."""
    for group in groups:
        yield from group.samples(policy)


def plan_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put rows into as few micro-batches as first-fit-decreasing finds; indices into `lengths`.

    Each holds at most `max_tokens` tokens, except that a longer row gets one of its own.
    Depends on nothing but its arguments; inside a micro-batch the order of the rows is kept.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        fitting = (b for b, free in enumerate(room) if length <= free)
        target = next(fitting, None)
        if target is None:
            bins.append([index])
            room.append(max_tokens - length)
        else:
            bins[target].append(index)
            room[target] -= length
    return [sorted(rows) for rows in bins]


def _samples_with_row(groups: Sequence[Group], policy: str) -> Iterator[tuple[int, Sample]]:
    """(position among all samples of the policy, sample)."""
    index = 0
    for group in groups:
        for episode in group.episodes:
            for sample in episode.samples:
                if sample.policy != policy:
                    continue
                if episode.is_trainable and any(sample.mask):
                    yield index, sample
                index += 1


def _make_row(sample: Sample, weights: Sequence[float] | None, dtype: DTypeLike) -> Row:
    sample.validate()
    length = len(sample.tokens)
    return Row(
        tokens_T=np.asarray(sample.tokens, dtype=np.int64),
        mask_T=np.asarray(sample.mask, dtype=np.bool_),
        weights_T=np.zeros(length, dtype) if weights is None else _column(sample, weights, dtype),
        advantages_T=np.zeros(length, dtype),
        behaviour_logprobs_T=np.asarray(sample.logprobs, dtype=dtype),
        temperature=sample.temperature,
        episode=(sample.prompt_id, sample.episode),
    )


def _column(sample: Sample, values: Sequence[float], dtype: DTypeLike) -> FloatArray:
    if len(values) != len(sample.tokens):
        raise ValueError(
            f"sample {sample.prompt_id}/{sample.episode}: {len(values)} values "
            f"for {len(sample.tokens)} tokens"
        )
    return np.asarray(values, dtype=dtype)
