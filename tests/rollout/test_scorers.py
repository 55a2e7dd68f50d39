from __future__ import annotations

import re
from typing import Any

import pytest

from paceline.rollout.scorers import (
    ScorerOptions,
    make_scorer,
    read_choice,
    read_number,
    score_choice,
    score_exact,
    score_numeric,
    score_regex,
)


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [(" 42\n", "42", 1.0), ("42", 42, 1.0), ("042", 42, 0.0), ("[1, 2]", [1, 2], 1.0)],
)
def test_exact(completion: str, answer: Any, value: float) -> None:
    assert score_exact(completion, answer) == value


def test_exact_can_ignore_case() -> None:
    assert score_exact("Yes", "yes") == 0.0
    assert score_exact("Yes", "yes", ignore_case=True) == 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12 + 30 = 42", 42.0),
        ("It is 1,234.5 metres.", 1234.5),
        ("3/4", 0.75),
        ("-2e3", -2000.0),
        (".5", 0.5),
        (r"so \boxed{7} of 9", 7.0),
        ("first 3\n#### 42 apples", 42.0),
        ("none at all", None),
        ("####", None),
        ("1/0", None),
    ],
)
def test_the_number_that_a_text_ends_up_with(text: str, number: float | None) -> None:
    assert read_number(text) == number


def test_numeric_tolerance_is_relative_above_one() -> None:
    assert score_numeric("1001", 1000, tolerance=0.001) == 1.0
    assert score_numeric("1002", 1000, tolerance=0.001) == 0.0
    assert score_numeric("0.1", "0.1000000001") == 1.0
    assert score_numeric("no number", 3) == 0.0


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("B.", "B"),
        ("**C**", "C"),
        ("(D)", "D"),
        ("The answer is C.", "C"),
        ("Answer: (A)", "A"),
        (r"\boxed{B}", "B"),
        ("A) is wrong, so I take (B)", "B"),
        ("A man walks. The answer is D", "D"),
        ("A man walks.", None),
        ("I would say D", "D"),
        ("E", None),
        ("", None),
    ],
)
def test_the_letter_that_a_text_chooses(text: str, letter: str | None) -> None:
    assert read_choice(text) == letter


def test_choice_takes_letters_and_indices() -> None:
    assert score_choice("(B)", "B") == 1.0
    assert score_choice("(B)", 1) == 1.0
    assert score_choice("E", "E", letters="ABCDE") == 1.0
    assert score_choice("I do not know", "B") == 0.0


def test_regex_compares_a_group_or_only_matches() -> None:
    group = re.compile(r"<a>(.*?)</a>")
    assert score_regex("<a>1</a> <a>2</a>", "2", group) == 1.0
    assert score_regex("<a>2</a> <a>1</a>", "2", group) == 0.0
    assert score_regex("2", "2", group) == 0.0
    named = re.compile(r"(x)?=(?P<answer>\w+)", re.IGNORECASE)
    assert score_regex("x=Yes", "yes", named) == 1.0
    assert score_regex("<think>a</think>", None, re.compile("^<think>")) == 1.0


@pytest.mark.parametrize(
    ("kind", "answer"), [("exact", None), ("numeric", "apple"), ("numeric", None), ("choice", "X")]
)
def test_an_answer_that_can_not_be_used_is_an_error(kind: str, answer: Any) -> None:
    with pytest.raises(ValueError, match="answer"):
        make_scorer(kind, ScorerOptions())("42", answer, {})


def test_math_verify() -> None:
    pytest.importorskip("math_verify")
    score = make_scorer("math_verify", ScorerOptions())
    assert score(r"It is $\boxed{\frac{2}{4}}$.", "1/2", {}) == 1.0
    assert score("so 0.5", r"\frac{1}{2}", {}) == 1.0
    assert score(r"$\boxed{2\sqrt{2}}$", r"\sqrt{8}", {}) == 1.0
    assert score("so 0.6", r"\frac{1}{2}", {}) == 0.0
    assert score("I give up", "3", {}) == 0.0
    with pytest.raises(ValueError, match="math-verify"):
        score("3", "", {})


def test_reasoning_gym_uses_the_scorer_of_the_task() -> None:
    gym = pytest.importorskip("reasoning_gym")
    task = gym.create_dataset("chain_sum", seed=1, size=2)
    metadata = {
        "reasoning_gym": {
            "task": "chain_sum",
            "params": {},
            "seed": 1,
            "size": 2,
            "index": 0,
            "entry": task[0],
        }
    }
    score = make_scorer("reasoning_gym", ScorerOptions())
    answer = task[0]["answer"]
    assert score(answer, answer, metadata) == 1.0
    assert score(f"Let me see: <answer> {answer} </answer>", answer, metadata) == 1.0
    assert score("no", answer, metadata) == 0.0
    with pytest.raises(ValueError, match="not made by reasoning-gym"):
        score("no", "1", {})
