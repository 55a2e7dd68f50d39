"""Advantages from the rewards of a group: pure functions over one reward per episode.

    centred         A_i = r_i - mean(r)
    standardised    A_i = (r_i - mean(r)) / (std(r) + 1e-6),  std unbiased: divided by n - 1

Sums are exact (`math.fsum`), so the order of the episodes changes nothing.
Legend: G episodes of a group that can be trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from paceline.algorithms.base import Credit
from paceline.algorithms.reductions import num_trained_tokens
from paceline.errors import RewardError
from paceline.observe.metrics import Metrics
from paceline.types import Episode, Group

STD_EPS = 1e-6
"""Keeps nearly equal rewards from being blown up."""

FLOAT32_EPS = 2.0**-23
"""Rewards that differ by less than float32 can tell are equal: the sum of a few parts, or a model
that scores in float32, is not more exact than that."""


def has_zero_variance(rewards_G: Sequence[float]) -> bool:
    """True if the rewards are equal up to float32's rounding, so that nothing can be learned."""
    if not rewards_G:
        return True
    spread = max(rewards_G) - min(rewards_G)
    return spread <= FLOAT32_EPS * max(abs(r) for r in rewards_G)


def centred(rewards_G: Sequence[float]) -> list[float]:
    """r - mean(r); exactly 0.0 if the rewards have no variance."""
    if has_zero_variance(rewards_G):
        return [0.0] * len(rewards_G)
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [r - mean for r in rewards_G]


def standardised(rewards_G: Sequence[float]) -> list[float]:
    """(r - mean(r)) / (unbiased std(r) + 1e-6); exactly 0.0 if the rewards have no variance.

    Example: [1, 1, 2] -> [-0.57735, -0.57735, 1.15470].
    """
    centred_G = centred(rewards_G)
    if not any(centred_G):
        return centred_G
    std = math.sqrt(math.fsum(c * c for c in centred_G) / (len(centred_G) - 1))
    return [c / (std + STD_EPS) for c in centred_G]


def credit_episodes(
    groups: Sequence[Group], policy: str, advantages: Callable[[list[float]], list[float]]
) -> Credit:
    """Give every trained token of an episode the episode's advantage among its group.

    Compared are the trainable episodes of one group, a role at a time, each with one reward
    however many samples it was cut into. Fewer than two leave nothing to compare: advantage 0.
    Raises RewardError if a trainable sample has no finite reward, or siblings disagree.
    """
    metrics = count_episodes(groups, policy)
    columns: list[list[float]] = []
    for group in groups:
        by_role = {
            role: _advantages_of_role(group, policy, role, advantages, metrics)
            for role in sorted({sample.role for sample in group.samples(policy)})
        }
        for index, episode in enumerate(group.episodes):
            for sample in episode.samples:
                if sample.policy == policy:
                    advantage = by_role[sample.role].get(index, 0.0)
                    columns.append([advantage if trained else 0.0 for trained in sample.mask])
    return Credit(columns, metrics=metrics)


def count_episodes(groups: Sequence[Group], policy: str) -> Metrics:
    """How many episodes the policy can not learn from, and why."""
    metrics = Metrics()
    for episode in (episode for group in groups for episode in group.episodes):
        if any(sample.policy == policy for sample in episode.samples):
            is_masked = episode.is_trainable and num_trained_tokens(episode, policy) == 0
            metrics.sum("train/masked_episodes", is_masked)
            metrics.sum("train/untrainable_episodes", not episode.is_trainable)
    return metrics


def _advantages_of_role(
    group: Group,
    policy: str,
    role: str,
    advantages: Callable[[list[float]], list[float]],
    metrics: Metrics,
) -> dict[int, float]:
    """Position of an episode in the group -> its advantage."""
    rewards: dict[int, float] = {}
    for index, episode in enumerate(group.episodes):
        reward = episode_reward(episode, policy, role) if episode.is_trainable else None
        if reward is not None:
            rewards[index] = reward
    values = list(rewards.values())
    is_small = len(values) < 2
    metrics.sum("train/small_groups", is_small)
    metrics.sum("train/zero_variance_groups", not is_small and has_zero_variance(values))
    found = [0.0] * len(values) if is_small else advantages(values)
    metrics.mean("train/advantage_abs", math.fsum(map(abs, found)), len(found))
    return dict(zip(rewards, found, strict=True))


def episode_reward(episode: Episode, policy: str, role: str) -> float | None:
    """The one reward of the samples that the role left; None if it left none."""
    found: float | None = None
    for sample in episode.samples:
        if sample.policy != policy or sample.role != role:
            continue
        place = f"prompt {sample.prompt_id!r}, episode {sample.episode}"
        if sample.reward is None or not math.isfinite(sample.reward):
            raise RewardError(
                f"{place}: the reward is {sample.reward} but the sample is marked "
                f"{sample.status.value}; one that can not be scored must be marked unscored"
            )
        if found is not None and sample.reward != found:
            raise RewardError(
                f"{place}: its samples have the rewards {found} and {sample.reward}; "
                "the samples of one role in one episode share one reward"
            )
        found = sample.reward
    return found
