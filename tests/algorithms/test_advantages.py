"""Advantages from rewards, with numbers worked out by hand."""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from batches import group_of, make_group, make_sample

from paceline.algorithms.advantages import (
    centred,
    has_zero_variance,
    leave_one_out,
    standardised,
    whitened,
)
from paceline.algorithms.base import Credit
from paceline.algorithms.group_credit import credit_episodes
from paceline.algorithms.grpo import Grpo
from paceline.errors import RewardError
from paceline.types import Group, Status


def episode_advantages(credit: Credit) -> list[float]:
    """The advantage on the last token of each sample."""
    return [column[-1] for column in credit.advantages]


def test_case_25_three_of_eight_correct() -> None:
    rewards = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    std = standardised(rewards)
    assert std == pytest.approx([1.20761] * 3 + [-0.72457] * 5, abs=5e-6)
    assert sum(std) == pytest.approx(0, abs=1e-12)
    plain = centred(rewards)
    assert plain == [0.625] * 3 + [-0.375] * 5
    assert sum(plain) == 0
    by_std = Grpo().credit([group_of(rewards)], "policy")
    assert episode_advantages(by_std) == std
    by_mean = Grpo(normalize="none").credit([group_of(rewards)], "policy")
    assert episode_advantages(by_mean) == plain


def test_case_26_the_standard_deviation_is_the_unbiased_one() -> None:
    assert standardised([1.0, 1.0, 2.0]) == pytest.approx([-0.57735, -0.57735, 1.15470], abs=5e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 0.35, -7.3, 1e6, float(np.float32(0.1))])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
@pytest.mark.parametrize("normalize", ["std", "none"])
def test_case_27_equal_rewards_give_exactly_zero(value: float, size: int, normalize: str) -> None:
    credit = Grpo(normalize=normalize).credit([group_of([value] * size)], "policy")
    assert episode_advantages(credit) == [0.0] * size
    assert credit.metrics.values()["train/zero_variance_groups"] == 1


def test_case_27_rewards_that_float32_can_not_tell_apart_are_equal() -> None:
    tenth, third = float(np.float32(0.1)), float(np.float32(0.35))
    for rewards in ([0.1, tenth, 0.1], [0.35, third], [0.1 + 0.2, 0.3]):
        assert has_zero_variance(rewards)
        assert standardised(rewards) == [0.0] * len(rewards)
    assert not has_zero_variance([0.1, 0.1001])
    assert not has_zero_variance([0.0, 1e-9])


def test_nearly_equal_rewards_are_not_blown_up() -> None:
    assert max(map(abs, standardised([0.0, 1e-9]))) < 1e-3


def test_case_28_a_group_of_one_has_no_advantage_and_is_counted() -> None:
    credit = Grpo().credit([group_of([5.0]), group_of([1.0, 0.0])], "policy")
    assert episode_advantages(credit)[0] == 0.0
    values = credit.metrics.values()
    assert values["train/small_groups"] == 1
    assert values["train/zero_variance_groups"] == 0
    assert Grpo().min_group_size == 2


@pytest.mark.parametrize("status", [Status.FAILED, Status.ABORTED, Status.UNSCORED])
def test_case_31_and_51_what_can_not_be_trained_on_is_not_in_the_baseline(status: Status) -> None:
    lost = make_sample(None, episode=2, status=status)
    group = make_group([[make_sample(1.0)], [make_sample(0.0, episode=1)], [lost]])
    credit = Grpo(normalize="none").credit([group], "policy")
    assert episode_advantages(credit) == [0.5, -0.5, 0.0]
    assert credit.metrics.values()["train/untrainable_episodes"] == 1


@pytest.mark.parametrize("reward", [None, math.nan, math.inf, -math.inf])
def test_case_31_a_trainable_sample_without_finite_reward_is_refused(reward: float) -> None:
    group = make_group([[make_sample(1.0)], [make_sample(reward, episode=1)]], "p")
    with pytest.raises(RewardError, match=r"'p', episode 1.*unscored"):
        Grpo().credit([group], "policy")


def test_case_32_permuted_and_tiled_groups_have_the_same_advantages() -> None:
    rewards = [0.1, 0.7, 1e5, 0.2, 0.9, -1e5, 0.35, 3.3]
    expected = dict(zip(rewards, standardised(rewards), strict=True))
    for seed in range(5):
        order = random.Random(seed).sample(rewards, len(rewards))
        assert standardised(order) == [expected[r] for r in order]
    tiled = [group_of(rewards, "p1"), group_of([3.0, 4.0], "p2")] * 2
    credit = Grpo().credit(tiled, "policy")
    half = len(credit.advantages) // 2
    assert credit.advantages[:half] == credit.advantages[half:]
    assert episode_advantages(credit)[:8] == list(expected.values())


def test_case_32_the_rows_of_an_episode_count_once_and_share_its_advantage() -> None:
    cut = [make_sample(1.0, row=0), make_sample(1.0, [False, True], row=1)]
    group = make_group([cut, [make_sample(0.0, episode=1)], [make_sample(0.0, episode=2)]])
    credit = Grpo(normalize="none").credit([group], "policy")
    assert episode_advantages(credit) == pytest.approx([2 / 3, 2 / 3, -1 / 3, -1 / 3])


def test_siblings_that_disagree_are_refused() -> None:
    cut = [make_sample(1.0, row=0), make_sample(0.0, row=1)]
    group = make_group([cut, [make_sample(0.0, episode=1)]])
    with pytest.raises(RewardError, match=r"'p', episode 0.*1\.0 and 0\.0"):
        Grpo().credit([group], "policy")


def test_an_episode_with_one_lost_row_is_left_out_whole() -> None:
    cut = [make_sample(9.0, row=0), make_sample(None, row=1, status=Status.ABORTED)]
    group = make_group([cut, [make_sample(0.0, episode=1)], [make_sample(1.0, episode=2)]])
    credit = Grpo(normalize="none").credit([group], "policy")
    assert episode_advantages(credit) == [0.0, 0.0, -0.5, 0.5]


def test_a_masked_truncation_counts_in_the_baseline_and_has_no_advantage() -> None:
    masked = make_sample(0.0, [False, False], episode=1, status=Status.TRUNCATED)
    group = make_group([[make_sample(1.0)], [masked]])
    credit = Grpo(normalize="none").credit([group], "policy")
    assert credit.advantages == [[0.0, 0.5, 0.5], [0.0, 0.0]]
    assert credit.metrics.values()["train/masked_episodes"] == 1


def test_case_12_a_rollout_of_masked_samples_is_counted_and_finite() -> None:
    group = group_of([1.0, 0.0], mask=(False, False), status=Status.TRUNCATED)
    credit = Grpo().credit([group], "policy")
    assert credit.advantages == [[0.0, 0.0], [0.0, 0.0]]
    values = credit.metrics.values()
    assert values["train/masked_episodes"] == 2
    assert all(map(math.isfinite, values.values()))


def test_advantages_are_zero_outside_the_mask() -> None:
    group = group_of([1.0, 0.0], mask=(False, True, False, True))
    credit = Grpo(normalize="none").credit([group], "policy")
    assert credit.advantages == [[0, 0.5, 0, 0.5], [0, -0.5, 0, -0.5]]


def test_roles_of_one_policy_have_baselines_of_their_own() -> None:
    def played(episode: int, first: float, second: float) -> list:
        return [
            make_sample(first, episode=episode, role="first"),
            make_sample(second, episode=episode, role="second"),
        ]

    group = make_group([played(0, 1.0, 10.0), played(1, 0.0, 14.0)])
    credit = Grpo(normalize="none").credit([group], "policy")
    assert episode_advantages(credit) == [0.5, -2.0, -0.5, 2.0]


def test_only_samples_of_the_policy_are_credited() -> None:
    group = make_group(
        [
            [make_sample(1.0), make_sample(50.0, policy="other")],
            [make_sample(0.0, episode=1), make_sample(70.0, policy="other", episode=1)],
        ]
    )
    assert episode_advantages(Grpo(normalize="none").credit([group], "policy")) == [0.5, -0.5]
    assert episode_advantages(Grpo(normalize="none").credit([group], "other")) == [-10, 10]


def test_another_baseline_is_one_function() -> None:
    group: Group = group_of([1.0, 2.0, 6.0])
    credit = credit_episodes([group], "policy", lambda rewards: [r - max(rewards) for r in rewards])
    assert episode_advantages(credit) == [-5.0, -4.0, 0.0]


def test_case_28_one_episode_is_compared_with_nothing_whatever_the_comparison() -> None:
    credit = credit_episodes([group_of([5.0])], "policy", lambda rewards: [9.0] * len(rewards))
    assert episode_advantages(credit) == [0.0]


def test_penalties_are_taken_off_an_episode_once_over_all_its_rows() -> None:
    cut = [make_sample(1.0, [False, True]), make_sample(1.0, [False, True], row=1)]
    group = make_group([cut, [make_sample(1.0, [False, True], episode=1)]])
    penalties = [[9.0, 0.25], [9.0, 0.5], [9.0, 0.25]]
    credit = credit_episodes([group], "policy", centred, penalties)
    assert episode_advantages(credit) == [-0.25, -0.25, 0.25]


def test_case_38_whitening_of_one_value_and_of_none() -> None:
    assert whitened([3.0]) == [0.0]
    assert whitened([]) == []
    found = whitened([1.0, 2.0, 3.0, 6.0])
    assert np.mean(found) == pytest.approx(0, abs=1e-12)
    assert np.std(found, ddof=1) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("compare", [centred, standardised, leave_one_out, whitened])
def test_case_31_nan_is_not_hidden_by_an_advantage_of_zero(
    compare: Callable[[list[float]], list[float]],
) -> None:
    for place in range(3):
        rewards = [1.0, 1.0, 1.0]
        rewards[place] = math.nan
        assert all(map(math.isnan, compare(rewards)))


def test_size_of_the_advantages_is_a_metric_per_episode() -> None:
    credit = Grpo(normalize="none").credit([group_of([1.0, 0.0]), group_of([2.0, 2.0])], "policy")
    assert credit.metrics.values()["train/advantage_abs"] == pytest.approx(0.25)
