"""REINFORCE++ on numbers worked out by hand."""

import math

import pytest
from batches import group_of, make_group, make_sample

from paceline.algorithms.base import Scores
from paceline.algorithms.reinforce_pp import ReinforcePp
from paceline.errors import TrainerError
from paceline.types import Group, Status


def two_answers() -> list[Group]:
    """Of two prompts: rewards 1 and 0, one and two trained tokens."""
    first = make_group([[make_sample(1.0, [False, True], prompt_id="a")]], "a")
    second = make_group([[make_sample(0.0, [False, True, True], prompt_id="b")]], "b")
    return [first, second]


def test_returns_are_whitened_over_all_tokens_of_the_rollout() -> None:
    """Returns 1, 0, 0: mean 1/3, unbiased deviation 0.57735."""
    credit = ReinforcePp().credit(two_answers(), "policy")
    assert credit.advantages[0] == pytest.approx([0, 1.15470], abs=5e-6)
    assert credit.advantages[1] == pytest.approx([0, -0.57735, -0.57735], abs=5e-6)
    values = credit.metrics.values()
    assert values["train/return"] == pytest.approx(1 / 3)
    assert values["train/zero_variance_rollouts"] == 0


def test_a_reward_is_discounted_once_for_each_token_ahead() -> None:
    """Returns 0.25, 0.5, 1 and 0, 0, 0."""
    groups = [group_of([1.0, 0.0], mask=(False, True, True, True))]
    credit = ReinforcePp(gamma=0.5).credit(groups, "policy")
    first = credit.advantages[0]
    assert first[3] - first[2] == pytest.approx(2 * (first[2] - first[1]))
    assert credit.metrics.values()["train/return"] == pytest.approx(1.75 / 6)
    assert sum(map(sum, credit.advantages)) == pytest.approx(0, abs=1e-12)


def test_kl_in_the_reward_adds_up_over_the_tokens_ahead() -> None:
    """k1 of the second answer: 0.2, -0.4; returns 1 - 0.05, then 0.02 and 0.04."""
    scores = Scores(
        old_logprobs=[[0, -1.0], [0, -1.0, -1.0]], reference_logprobs=[[0, -1.5], [0, -1.2, -0.6]]
    )
    credit = ReinforcePp(kl_coef=0.1).credit(two_answers(), "policy", scores)
    returns = [0.95, 0.02, 0.04]
    mean = sum(returns) / 3
    std = math.sqrt(sum((r - mean) ** 2 for r in returns) / 2)
    found = [a for column in credit.advantages for a in column[1:]]
    assert found == pytest.approx([(r - mean) / (std + 1e-6) for r in returns])


def test_the_group_baseline_takes_the_prompts_mean_off_first() -> None:
    """An easy and a hard prompt: the mean of each is no advantage."""
    groups = [group_of([10.0, 9.0], "a"), group_of([1.0, 0.0], "b")]
    credit = ReinforcePp(baseline="group").credit(groups, "policy")
    found = [column[-1] for column in credit.advantages]
    assert found[0] == found[2] == -found[1] == -found[3] > 0
    without = ReinforcePp().credit(groups, "policy")
    assert without.advantages[1][-1] > 0 > without.advantages[2][-1]


def test_case_28_only_a_group_baseline_needs_siblings() -> None:
    assert ReinforcePp().min_group_size == 1
    assert ReinforcePp(baseline="group").min_group_size == 2
    alone = ReinforcePp(baseline="group").credit([group_of([5.0]), group_of([1.0, 0.0])], "policy")
    assert alone.metrics.values()["train/small_groups"] == 1
    assert alone.advantages[0][-1] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.1, 0.35, -7.3])
@pytest.mark.parametrize("baseline", ["none", "group"])
def test_case_27_equal_rewards_give_exactly_zero(value: float, baseline: str) -> None:
    credit = ReinforcePp(baseline=baseline).credit([group_of([value] * 4)] * 2, "policy")
    assert credit.advantages == [[0.0, 0.0, 0.0]] * 8
    assert credit.metrics.values()["train/zero_variance_rollouts"] == 1


def test_case_38_only_trained_tokens_are_whitened() -> None:
    plain = ReinforcePp().credit(two_answers(), "policy")
    padded = two_answers()
    for group in padded:
        for sample in group.samples():
            sample.tokens += [0, 0]
            sample.mask += [False, False]
            sample.logprobs += [0.0, 0.0]
    lost = make_group([[make_sample(None, status=Status.FAILED)]])
    found = ReinforcePp().credit([*padded, lost], "policy")
    assert found.advantages == [[*column, 0, 0] for column in plain.advantages] + [[0, 0, 0]]


def test_case_38_a_single_trained_token_is_finite() -> None:
    credit = ReinforcePp().credit([group_of([3.0], mask=(False, True))], "policy")
    assert credit.advantages == [[0.0, 0.0]]


def test_case_12_a_rollout_without_trained_tokens() -> None:
    masked = group_of([1.0, 0.0], mask=(False, False), status=Status.TRUNCATED)
    credit = ReinforcePp().credit([masked], "policy")
    assert credit.advantages == [[0.0, 0.0]] * 2
    assert all(map(math.isfinite, credit.metrics.values().values()))


def test_case_31_a_nan_log_prob_is_not_hidden() -> None:
    """It is counted, and makes advantages NaN, upon which the trainer skips the update."""
    scores = Scores(
        old_logprobs=[[0, math.nan], [0, -1.0, -1.0]],
        reference_logprobs=[[0, -1.5], [0, -1.2, -math.inf]],
    )
    credit = ReinforcePp(kl_coef=0.1).credit(two_answers(), "policy", scores)
    assert credit.metrics.values()["train/nonfinite_kl_rewards"] == 2
    assert all(map(math.isnan, (column[-1] for column in credit.advantages)))


def test_a_missing_column_is_named() -> None:
    with pytest.raises(TrainerError, match=r"reinforce_pp.*reference_logprobs"):
        ReinforcePp(kl_coef=0.1).credit(
            two_answers(), "policy", Scores(old_logprobs=[[0, 0], [0, 0, 0]])
        )
