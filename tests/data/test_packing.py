"""Rows, optimizer steps and micro-batches made of groups."""

import math

import numpy as np
import pytest
from batches import group_of, make_group, make_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.algorithms.base import Credit
from paceline.algorithms.grpo import Grpo
from paceline.algorithms.sft import Sft
from paceline.data.packing import (
    assign_credit,
    make_batches,
    make_rows,
    plan_micro_batches,
    read_scores,
    split_updates,
    take_values,
    with_final_position,
)
from paceline.types import Group, Status


def rollout() -> list[Group]:
    """Samples of the policy in order: cut in two, lost, masked, of two policies."""
    return [
        make_group(
            [
                [
                    make_sample(1.0, [False, True, True], prompt_id="a"),
                    make_sample(1.0, [False, True], prompt_id="a", row=1),
                ],
                [make_sample(None, [False, True], episode=1, status=Status.FAILED)],
                [make_sample(0.0, [False, False], episode=2, status=Status.TRUNCATED)],
            ],
            "a",
        ),
        make_group(
            [
                [make_sample(1.0, prompt_id="b"), make_sample(5.0, policy="judge")],
                [make_sample(0.0, [False, False, True, False], prompt_id="b", episode=1)],
            ],
            "b",
        ),
    ]


def test_a_row_holds_the_columns_of_its_sample() -> None:
    sample = make_sample(1.0, [False, False, True, True], logprobs=[0, 0, -0.3, -0.1], episode=4)
    sample.temperature = 0.7
    groups = [make_group([[sample]])]
    credit = Credit([[0, 0, 1.5, 1.5]], returns=[[0, 0, 2.0, 3.0]])
    (row,) = make_rows(groups, "policy", credit, [[0, 0, 0.5, 0.5]])
    assert row.tokens_T.tolist() == [1, 2, 3, 4]
    assert row.tokens_T.dtype == np.int64
    assert row.mask_T.tolist() == [False, False, True, True]
    assert row.behaviour_logprobs_T == pytest.approx([0, 0, -0.3, -0.1])
    assert row.advantages_T.tolist() == [0, 0, 1.5, 1.5]
    assert row.weights_T.tolist() == [0, 0, 0.5, 0.5]
    assert row.returns_T is not None
    assert row.returns_T.tolist() == [0, 0, 2, 3]
    assert row.old_logprobs_T is None
    assert row.temperature == 0.7
    assert row.episode == ("p", 4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_float_columns_have_the_type_asked_for(dtype: type) -> None:
    (batch,) = make_batches([group_of([1.0])], "policy", Grpo(), dtype=dtype)
    assign_credit([group_of([1.0])], "policy", batch.rows, Credit([[0, 1, 1]]))
    for column in ("weights_T", "advantages_T", "behaviour_logprobs_T"):
        assert getattr(batch.rows[0], column).dtype == dtype


def test_only_trained_samples_of_the_policy_become_rows() -> None:
    rows = make_rows(rollout(), "policy")
    assert [row.episode for row in rows] == [("a", 0), ("a", 0), ("b", 0), ("b", 1)]
    assert [len(row.tokens_T) for row in rows] == [3, 2, 3, 4]
    assert [row.episode for row in make_rows(rollout(), "judge")] == [("p", 0)]


def test_columns_stay_with_their_samples_past_those_without_row() -> None:
    groups = rollout()
    algorithm = Grpo(normalize="none")
    (batch,) = make_batches(groups, "policy", algorithm)
    assign_credit(groups, "policy", batch.rows, algorithm.credit(groups, "policy"))
    assert [row.advantages_T.tolist() for row in batch.rows] == [
        [0, 0.5, 0.5],
        [0, 0.5],
        [0, 0.5, 0.5],
        [0, 0, -0.5, 0],
    ]
    assert sum(row.weights_T.sum() for row in batch.rows) == pytest.approx(1.0)
    assert batch.rows[3].weights_T.tolist() == pytest.approx([0, 0, 1 / 6, 0])


def test_scores_come_back_in_the_order_of_the_samples() -> None:
    groups = rollout()
    rows = make_rows(groups, "policy")
    for i, row in enumerate(rows):
        row.old_logprobs_T = np.full(len(row.tokens_T), -float(i))
    scores = read_scores(groups, "policy", rows)
    assert scores.old_logprobs == [
        [0, 0, 0],
        [-1, -1],
        [0, 0],
        [0, 0],
        [-2, -2, -2],
        [-3, -3, -3, -3],
    ]
    assert scores.reference_logprobs is None
    assert scores.values is None


def test_a_critic_is_asked_for_the_end_of_a_row() -> None:
    (row,) = make_rows([group_of([1.0], mask=(False, True))], "policy")
    asked = with_final_position(row)
    assert asked.tokens_T.tolist() == [1, 2, 0]
    assert asked.mask_T.tolist() == [False, True, True]
    for column in ("weights_T", "advantages_T", "behaviour_logprobs_T"):
        assert len(getattr(asked, column)) == 3
        assert getattr(asked, column).dtype == getattr(row, column).dtype
    assert (asked.temperature, asked.episode) == (row.temperature, row.episode)
    take_values(row, np.array([0.0, 0.25, 0.75]))
    assert row.values_T is not None
    assert row.values_T.tolist() == [0, 0.25]
    assert row.final_value == 0.75
    take_values(row, np.array([0.0, 0.5]))
    assert row.final_value is None
    with pytest.raises(ValueError, match="4 values for a row of 2 tokens"):
        take_values(row, np.zeros(4))


def test_final_values_come_back_in_the_order_of_the_samples() -> None:
    groups = rollout()
    rows = make_rows(groups, "policy")
    assert read_scores(groups, "policy", rows).final_values is None
    for i, row in enumerate(rows):
        row.final_value = 1.0 + i
    assert read_scores(groups, "policy", rows).final_values == [1, 2, 0, 0, 3, 4]


def test_case_12_a_rollout_without_trained_tokens_makes_batches_without_rows() -> None:
    masked = [group_of([1.0, 0.0], mask=(False, False))]
    (batch,) = make_batches(masked, "policy", Grpo(loss_mean="episode"))
    assert batch.rows == []
    assert (batch.num_tokens, batch.num_trained_tokens) == (0, 0)
    scores = read_scores(masked, "policy", batch.rows)
    assert scores.values == [[0, 0], [0, 0]]
    assign_credit(masked, "policy", batch.rows, Grpo().credit(masked, "policy", scores))


def test_each_update_has_its_own_denominator() -> None:
    groups = [group_of([1.0], "a", mask=(False, True)), group_of([1.0], "b")]
    first, second = make_batches(groups, "policy", Sft(), num_updates=2)
    assert first.rows[0].weights_T.tolist() == [0, 1]
    assert second.rows[0].weights_T.tolist() == [0, 0.5, 0.5]
    (both,) = make_batches(groups, "policy", Sft())
    assert both.rows[0].weights_T.tolist() == pytest.approx([0, 1 / 3])
    assert both.num_trained_tokens == 3


@pytest.mark.parametrize("column", ["mask", "logprobs", "versions"])
def test_case_23_a_column_of_another_length_is_refused_before_training(column: str) -> None:
    group = group_of([1.0])
    getattr(group.episodes[0].samples[0], column).pop()
    with pytest.raises(ValueError, match="p/0: column lengths differ"):
        make_rows([group], "policy")


def test_case_23_an_absent_behaviour_log_prob_is_refused_before_training() -> None:
    group = group_of([1.0], logprobs=(0.0, math.nan, -1.0))
    with pytest.raises(ValueError, match="p/0: behaviour log-prob at position 1 is nan"):
        make_rows([group], "policy")


def test_weights_and_credit_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="2 values for 3 tokens"):
        make_rows([group_of([1.0])], "policy", weights=[[0.0, 1.0]])
    with pytest.raises(ValueError, match="4 values for 3 tokens"):
        make_rows([group_of([1.0])], "policy", Credit([[0.0] * 4]))


@pytest.mark.parametrize(
    ("num_groups", "num_updates", "sizes"),
    [(8, 1, [8]), (8, 4, [2, 2, 2, 2]), (7, 3, [2, 2, 3]), (2, 4, [1, 1]), (0, 3, [])],
)
def test_updates_are_whole_groups_in_order_and_even(
    num_groups: int, num_updates: int, sizes: list[int]
) -> None:
    groups = [group_of([1.0, 0.0], f"p{i}") for i in range(num_groups)]
    parts = split_updates(groups, num_updates)
    assert [len(part) for part in parts] == sizes
    assert [group for part in parts for group in part] == groups


def test_no_update_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 update, found 0"):
        split_updates([group_of([1.0])], 0)


def test_micro_batches_first_fit_decreasing() -> None:
    assert plan_micro_batches([], 10) == []
    assert plan_micro_batches([4, 6, 5, 5], 10) == [[0, 1], [2, 3]]
    assert plan_micro_batches([3, 12, 3, 4], 10) == [[1], [0, 2, 3]]
    assert plan_micro_batches([1, 1, 1], 1) == [[0], [1], [2]]


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(lengths=st.lists(st.integers(0, 50), max_size=40), max_tokens=st.integers(1, 60))
def test_micro_batches_hold_every_row_once_within_the_budget(
    lengths: list[int], max_tokens: int
) -> None:
    plan = plan_micro_batches(lengths, max_tokens)
    assert sorted(i for rows in plan for i in rows) == list(range(len(lengths)))
    for rows in plan:
        assert rows == sorted(rows)
        assert sum(lengths[i] for i in rows) <= max_tokens or len(rows) == 1
    # Two micro-batches that fit together would have been one.
    sums = sorted(sum(lengths[i] for i in rows) for rows in plan)
    assert len(sums) < 2 or sums[0] + sums[1] > max_tokens
    assert plan == plan_micro_batches(lengths, max_tokens)
