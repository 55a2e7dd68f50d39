"""Baselines made of what a role earned before, on numbers worked out by hand."""

from __future__ import annotations

import math
import random

import pytest
from batches import make_group, make_sample
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.algorithms.base import Baselines, Scores
from paceline.algorithms.reinforce_pp import ReinforcePp
from paceline.algorithms.rloo import Rloo
from paceline.errors import TrainerError
from paceline.types import Group, Status


def rollout(*rewards: dict[str, float]) -> list[Group]:
    """One group of one episode for each: role -> reward."""
    return [
        make_group(
            [[make_sample(r, role=role, prompt_id=f"p{i}") for role, r in by_role.items()]], f"p{i}"
        )
        for i, by_role in enumerate(rewards)
    ]


def running(**settings: object) -> Rloo:
    return Rloo(baseline="running", **settings)  # type: ignore[arg-type]


def advantages(groups: list[Group], before: Baselines, **settings: object) -> list[float]:
    credit = running(**settings).credit(groups, "policy", Scores(baselines=before))
    return [column[-1] for column in credit.advantages]


def test_each_role_is_compared_with_its_own_past() -> None:
    groups = rollout({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.5})
    before = {"a": (0.25, 8), "b": (-1.0, 8), "c": (9.0, 3)}
    assert advantages(groups, before) == [0.75, 1.0, -0.25, 1.5]
    credit = running().credit(groups, "policy", Scores(baselines=before))
    assert credit.baselines == {
        "a": (0.25 + 2 / 10 * (0.5 - 0.25), 10),
        "b": (-1.0 + 2 / 10 * (0.25 + 1.0), 10),
        "c": (9.0, 3),
    }
    assert before == {"a": (0.25, 8), "b": (-1.0, 8), "c": (9.0, 3)}, "algorithms are pure"
    numbers = credit.metrics.values()
    assert (numbers["train/baseline/a"], numbers["train/baseline/b"]) == (0.25, -1.0)
    assert "train/baseline/c" not in numbers


def test_without_a_past_a_reward_is_compared_with_the_others_of_its_role() -> None:
    groups = rollout({"a": 1.0, "b": 5.0}, {"a": 0.0}, {"a": 0.5})
    assert advantages(groups, {}) == [0.75, 0.0, -0.75, 0.0]
    credit = running().credit(groups, "policy", Scores())
    assert credit.baselines == {"a": (0.5, 3), "b": (5.0, 1)}


def test_equal_rewards_are_worth_what_they_are_above_the_past() -> None:
    """A group baseline would learn nothing from them."""
    assert advantages(rollout({"a": 1.0}, {"a": 1.0}), {"a": (0.25, 9)}) == [0.75, 0.75]
    groups = [make_group([[make_sample(1.0, episode=i)] for i in range(3)])]
    assert advantages(groups, {"policy": (0.0, 1)}) == [1.0] * 3


def test_the_mean_is_that_of_all_rewards_and_forgets_beyond_the_window() -> None:
    rewards = [[1.0, 0.0, 0.5], [2.0], [0.0, 4.0]]
    state: Baselines = {}
    for batch in rewards:
        groups = rollout(*({"a": r} for r in batch))
        credit = running(baseline_window=100).credit(groups, "policy", Scores(baselines=state))
        assert credit.baselines is not None
        state = credit.baselines
    flat = [r for batch in rewards for r in batch]
    assert state["a"] == (pytest.approx(sum(flat) / len(flat)), len(flat))
    state = {"a": (0.0, 4)}
    for number in range(1, 9):
        groups = rollout({"a": 1.0})
        credit = running(baseline_window=4).credit(groups, "policy", Scores(baselines=state))
        assert credit.baselines is not None
        state = credit.baselines
        assert state["a"] == (pytest.approx(1 - 0.8**number), 4)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12), st.randoms(use_true_random=False))
def test_order_and_what_is_not_trained_change_nothing(
    rewards: list[float], chance: random.Random
) -> None:
    groups = rollout(*({"a": r} for r in rewards))
    lost = make_group([[make_sample(None, role="a", status=Status.FAILED)]], "lost")
    moved = [*groups, lost]
    chance.shuffle(moved)
    for before in ({}, {"a": (0.3, 5)}):
        plain = running().credit(groups, "policy", Scores(baselines=dict(before)))
        other = running().credit(moved, "policy", Scores(baselines=dict(before)))
        assert other.baselines == plain.baselines
        found = {g.prompt.id: c for g, c in zip(moved, other.advantages, strict=True)}
        assert found.pop("lost") == [0.0, 0.0, 0.0]
        assert [found[g.prompt.id] for g in groups] == plain.advantages


def test_case_28_one_answer_a_prompt_will_do() -> None:
    assert running().min_group_size == 1
    assert ReinforcePp(baseline="running").min_group_size == 1
    assert Rloo().min_group_size == 2


def test_a_broken_kl_does_not_stay_in_the_baseline() -> None:
    groups = rollout({"a": 1.0}, {"a": 0.5})
    columns = [[0.0, math.nan, 0.0], [0.0, 0.0, 0.0]]
    scores = Scores(
        old_logprobs=columns, reference_logprobs=[[0.0] * 3] * 2, baselines={"a": (0.0, 1)}
    )
    credit = running(kl_coef=0.1).credit(groups, "policy", scores)
    assert math.isnan(credit.advantages[0][-1])
    assert credit.baselines == {"a": (0.25, 2)}


def test_the_kl_in_the_reward_is_part_of_what_is_remembered() -> None:
    groups = rollout({"a": 1.0})
    scores = Scores(
        old_logprobs=[[0.0, -1.0, -1.0]],
        reference_logprobs=[[0.0, -3.0, -2.0]],
        baselines={"a": (0.5, 1)},
    )
    credit = running(kl_coef=0.1).credit(groups, "policy", scores)
    assert credit.advantages[0][1:] == pytest.approx([0.2, 0.2])
    assert credit.baselines == {"a": (pytest.approx(0.6), 2)}


def test_roles_with_other_scales_meet_at_one_level_before_they_are_whitened() -> None:
    groups = rollout({"a": 11.0, "b": 0.0}, {"a": 9.0, "b": 2.0})
    before = {"a": (10.0, 50), "b": (1.0, 50)}
    algorithm = ReinforcePp(baseline="running")
    credit = algorithm.credit(groups, "policy", Scores(baselines=before))
    found = [column[-1] for column in credit.advantages]
    assert found[0] == found[3] == -found[1] == -found[2] > 0
    assert credit.baselines == {"a": (10.0, 52), "b": (1.0, 52)}
    assert ReinforcePp().credit(groups, "policy", Scores(baselines=before)).baselines is None


def test_without_its_state_it_says_so() -> None:
    for algorithm in (running(), ReinforcePp(baseline="running")):
        with pytest.raises(TrainerError, match=f"{algorithm.kind} needs baselines"):
            algorithm.credit(rollout({"a": 1.0}), "policy")
    with pytest.raises(ValidationError):
        running(baseline_window=0)
