from __future__ import annotations

import decimal
import fractions
import math
from typing import Any

import numpy as np
import pytest
import torch

from paceline.rollout.score import Score, exception_score, to_score


@pytest.mark.parametrize(
    ("result", "value"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.25, 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(2.0), 2.0),
        (torch.tensor(1.5), 1.5),
        (fractions.Fraction(1, 4), 0.25),
        (decimal.Decimal("0.125"), 0.125),
    ],
)
def test_every_kind_of_number_is_the_same_float(result: Any, value: float) -> None:
    """Case 52."""
    score = to_score(result, {})
    assert score == Score(value)
    assert type(score.value) is float


@pytest.mark.parametrize(
    ("result", "cause"),
    [
        (None, "none"),
        (math.nan, "nan"),
        (np.float32("nan"), "nan"),
        (math.inf, "inf"),
        (-math.inf, "inf"),
        (10**400, "inf"),
        ("1.0", "bad_result"),
        ([1.0], "bad_result"),
        (np.zeros(2), "bad_result"),
        (1j, "bad_result"),
        ({}, "bad_result"),
        (object(), "bad_result"),
        ({"a": None}, "none"),
        ({"a": 1.0, "b": math.nan}, "nan"),
        ({"a": "yes"}, "bad_result"),
    ],
)
def test_what_is_no_number_can_not_be_scored(result: Any, cause: str) -> None:
    """Cases 31 and 52: NaN, infinities and None are causes, never numbers."""
    score = to_score(result, {})
    assert (score.value, score.cause) == (None, cause)
    assert score.detail
    assert score.reason == f"reward/{cause}: {score.detail}"


def test_named_parts_are_summed() -> None:
    assert to_score({"a": 1, "b": np.float64(0.5)}, {}) == Score(1.5, {"a": 1.0, "b": 0.5})


def test_weights_choose_the_reward_and_the_rest_is_only_logged() -> None:
    """Case 52: a reward of several parts."""
    score = to_score({"a": 1, "b": 0.5, "c": None, "d": math.nan}, {"a": 2.0, "b": 0.0})
    assert score == Score(2.0, {"a": 1.0, "b": 0.5})


def test_a_weighted_part_that_is_missing_is_a_failure() -> None:
    assert to_score({"a": 1}, {"b": 1.0}).cause == "bad_result"
    assert to_score(1.0, {"b": 1.0}).cause == "bad_result"


def test_an_object_that_can_not_be_shown_is_still_a_failure() -> None:
    class Shy:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert "RuntimeError" in to_score(Shy(), {}).detail


def test_an_exception_names_the_line_of_the_user() -> None:
    def ours() -> None:
        theirs()

    def theirs() -> None:
        raise KeyError("colour")

    try:
        ours()
    except KeyError as exc:
        score = exception_score(exc, frozenset(), 0.5)
    assert (score.value, score.cause, score.seconds) == (None, "KeyError", 0.5)
    summary, _, traceback_text = score.detail.partition("\n")
    assert "'colour'" in summary
    assert "test_score.py" in summary
    assert "in theirs" in summary
    assert 'raise KeyError("colour")' in traceback_text
