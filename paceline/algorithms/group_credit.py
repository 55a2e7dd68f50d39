"""Credit by comparing the episodes of one prompt with each other: no critic.

Compared are the trainable episodes of one group, a role at a time, each with one reward however
many samples it was cut into. Fewer than two leave nothing to compare: advantage 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Literal

from paceline.algorithms.advantages import centred, has_zero_variance, standardised
from paceline.algorithms.base import Credit
from paceline.algorithms.policy_gradient import PolicyGradient
from paceline.algorithms.reductions import num_trained_tokens
from paceline.algorithms.trajectories import Columns, Trajectory, empty_columns, trajectories
from paceline.observe.metrics import Metrics
from paceline.types import Group

Compare = Callable[[list[float]], list[float]]
"""Rewards of a group [G] -> advantages [G]."""


class GroupRelative(PolicyGradient):
    """Settings of a comparison by mean and standard deviation."""

    normalize: Literal["std", "none"] = "std"
    """`std` divides the centred rewards of a group by their unbiased standard deviation plus 1e-6;
    `none` only centres them, so that easy and hard prompts keep their own scale."""

    @property
    def min_group_size(self) -> int:
        return 2

    def compare(self, rewards_G: list[float]) -> list[float]:
        """Advantages of one group's episodes."""
        return standardised(rewards_G) if self.normalize == "std" else centred(rewards_G)


def credit_episodes(
    groups: Sequence[Group], policy: str, compare: Compare, penalties: Columns | None = None
) -> Credit:
    """Give every trained token of an episode the episode's advantage among its group.

    penalties: per sample and token; their sum is taken off the reward of an episode's role.
    Raises RewardError if a trainable sample has no finite reward, or siblings disagree.
    """
    metrics = count_episodes(groups, policy)
    paths = trajectories(groups, policy)
    rewards = penalised(paths, penalties)
    advantages = compare_groups(groups, policy, paths, rewards, compare, metrics)
    return episode_credit(groups, policy, paths, advantages, metrics)


def penalised(paths: Sequence[Trajectory], penalties: Columns | None) -> list[float]:
    """The reward of each trajectory, less the sum of its tokens' penalties."""
    if penalties is None:
        return [path.reward for path in paths]
    return [path.reward - math.fsum(path.read(penalties)) for path in paths]


def episode_credit(
    groups: Sequence[Group],
    policy: str,
    paths: Sequence[Trajectory],
    advantages: Sequence[float],
    metrics: Metrics,
) -> Credit:
    """Give every trained token of a trajectory the trajectory's advantage."""
    metrics.mean("train/advantage_abs", math.fsum(map(abs, advantages)), len(advantages))
    columns = empty_columns(groups, policy)
    for path, advantage in zip(paths, advantages, strict=True):
        path.write(columns, repeat(advantage))
    return Credit(columns, metrics=metrics)


def compare_groups(
    groups: Sequence[Group],
    policy: str,
    paths: Sequence[Trajectory],
    rewards: Sequence[float],
    compare: Compare,
    metrics: Metrics,
) -> list[float]:
    """The advantage of each trajectory, from the reward of each; counts groups without any."""
    members: dict[tuple[int, str], list[int]] = {
        (number, role): []
        for number, group in enumerate(groups)
        for role in sorted({sample.role for sample in group.samples(policy)})
    }
    for index, path in enumerate(paths):
        members[path.group, path.role].append(index)
    advantages = [0.0] * len(paths)
    for indices in members.values():
        rewards_G = [rewards[index] for index in indices]
        is_small = len(rewards_G) < 2
        metrics.sum("train/small_groups", is_small)
        metrics.sum("train/zero_variance_groups", not is_small and has_zero_variance(rewards_G))
        if not is_small:
            for index, advantage in zip(indices, compare(rewards_G), strict=True):
                advantages[index] = advantage
    return advantages


def count_episodes(groups: Sequence[Group], policy: str) -> Metrics:
    """How many episodes the policy can not learn from, and why."""
    metrics = Metrics()
    for episode in (episode for group in groups for episode in group.episodes):
        if any(sample.policy == policy for sample in episode.samples):
            is_masked = episode.is_trainable and num_trained_tokens(episode, policy) == 0
            metrics.sum("train/masked_episodes", is_masked)
            metrics.sum("train/untrainable_episodes", not episode.is_trainable)
    return metrics
