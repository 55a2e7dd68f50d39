"""Which rows share a micro-batch, and where their tokens lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_rows import random_rows

from paceline.errors import TrainerError
from paceline.trainers.layout import (
    choose_layout,
    input_lengths,
    make_micro_batch,
    plan_micro_batches,
)
from paceline.types import Row

CPU = torch.device("cpu")


def _row(tokens: list[int], mask: list[int], temperature: float = 1.0) -> Row:
    zeros_T = np.zeros(len(tokens))
    return Row(
        np.array(tokens), np.array(mask, bool), zeros_T, zeros_T, zeros_T, temperature=temperature
    )


def test_padded_micro_batch_of_two_rows():
    rows = [_row([5, 6, 7, 2], [0, 0, 1, 1], 0.5), _row([8, 9, 3], [0, 1, 0])]
    lengths = input_lengths(rows)
    assert lengths == [3, 1]
    batch = make_micro_batch(rows, [0, 1], lengths, "padded", CPU)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch.position_ids is None
    assert batch.predicting_N.tolist() == [1, 2, 3]
    assert batch.targets_N.tolist() == [7, 2, 9]
    assert batch.temperatures_N.tolist() == [0.5, 0.5, 1.0]
    assert batch.rows_N.tolist() == [0, 0, 1]


def test_packed_micro_batch_of_two_rows():
    rows = [_row([5, 6, 7, 2], [0, 0, 1, 1]), _row([8, 9, 3], [0, 1, 1])]
    batch = make_micro_batch(rows, [0, 1], input_lengths(rows), "packed", CPU)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.predicting_N.tolist() == [1, 2, 3, 4]
    assert batch.targets_N.tolist() == [7, 2, 9, 3]


def test_trained_first_token_is_refused_with_its_prompt():
    row = _row([5, 6], [1, 1])
    row.episode = ("add-17", 0)
    with pytest.raises(TrainerError, match=r"row 0.*add-17.*first token"):
        input_lengths([row])


def test_rows_without_trained_tokens_are_left_out():
    rows = [_row([5, 6], [0, 0]), _row([5, 6], [0, 1])]
    assert plan_micro_batches(input_lengths(rows), 100, "padded") == [[1]]


def test_oversize_row_gets_a_micro_batch_of_its_own():
    assert plan_micro_batches([5, 50, 5], 20, "packed") == [[1], [0, 2]]
    assert plan_micro_batches([5, 50, 5], 20, "padded") == [[1], [0, 2]]


def test_a_long_row_is_not_filled_up_for_short_ones():
    assert plan_micro_batches([600] + [20] * 60, 8192, "padded") == [[0], list(range(1, 61))]


def test_layout_rule():
    assert choose_layout("sdpa") == choose_layout("eager") == "padded"
    assert choose_layout("flash_attention_2") == "packed"


@given(
    st.lists(st.integers(0, 300), max_size=60),
    st.integers(1, 1000),
    st.sampled_from(["padded", "packed"]),
)
def test_every_row_is_in_one_micro_batch_within_the_budget(lengths, budget, layout):
    plan = plan_micro_batches(lengths, budget, layout)
    assert sorted(i for rows in plan for i in rows) == [i for i, n in enumerate(lengths) if n]
    for rows in plan:
        sizes = [lengths[i] for i in rows]
        positions = sum(sizes) if layout == "packed" else len(sizes) * max(sizes)
        assert positions <= budget or len(rows) == 1
        assert rows == sorted(rows)
    assert plan == plan_micro_batches(list(lengths), budget, layout)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_token_before_each_target_predicts_it(layout):
    rows = random_rows(seed=5, num=7)
    lengths = input_lengths(rows)
    batch = make_micro_batch(rows, [0, 2, 5, 6], lengths, layout, CPU)
    predicting = batch.input_ids.flatten()[batch.predicting_N].tolist()
    pairs = list(zip(predicting, batch.targets_N.tolist(), strict=True))
    expected = [
        (int(row.tokens_T[t - 1]), int(row.tokens_T[t]))
        for row in (rows[i] for i in batch.rows)
        for t in np.flatnonzero(row.mask_T)
    ]
    assert pairs == expected
