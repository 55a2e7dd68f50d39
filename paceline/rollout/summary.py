"""Numbers of a step's rollouts, over everything that was sampled and before anything is masked."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from paceline.observe.metrics import Metrics
from paceline.rollout.filters import answer_lengths, is_zero_variance, rewards_of
from paceline.types import Group, Status


def summarise(groups: Sequence[Group], policy: str) -> Metrics:
    """`rollout/...` of groups whose failures are settled and whose rewards are shaped."""
    metrics = Metrics()
    for group in groups:
        _add_rewards(metrics, group, policy)
        _add_samples(metrics, group, policy)
        for episode in group.episodes:
            for name, value in episode.metrics.items():
                metrics.mean(f"rollout/env/{_plain(name)}", value)
    rewards = [reward for group in groups for reward in rewards_of(group, policy)]
    if rewards:
        metrics.mean("rollout/reward_std", statistics.pstdev(rewards))
    return metrics


def _add_rewards(metrics: Metrics, group: Group, policy: str) -> None:
    rewards = rewards_of(group, policy)
    metrics.mean_of("rollout/reward", rewards)
    if not rewards:
        return
    is_equal = is_zero_variance(group, policy)
    metrics.mean("rollout/zero_variance", is_equal)
    metrics.mean("rollout/all_correct", is_equal and rewards[0] > 0)
    metrics.mean("rollout/all_wrong", is_equal and rewards[0] <= 0)
    metrics.mean("rollout/reward_group_std", statistics.pstdev(rewards))
    metrics.max("rollout/reward_max", max(rewards))
    metrics.min("rollout/reward_min", min(rewards))


def _add_samples(metrics: Metrics, group: Group, policy: str) -> None:
    for sample in group.samples(policy):
        metrics.sum("rollout/samples", 1)
        if sample.cause is not None:
            origin, _, cause = sample.cause.partition("/")
            metrics.sum(f"rollout/failures/{origin}/{cause}", 1)
        metrics.mean("rollout/failed", sample.cause is not None)
        if not sample.status.is_trainable:
            continue
        metrics.mean("rollout/truncated", sample.status is Status.TRUNCATED)
        if True in sample.mask:
            metrics.mean("rollout/prompt_tokens", sample.mask.index(True))
        for name, value in sample.reward_parts.items():
            metrics.mean(f"rollout/reward_part/{_plain(name)}", value)
        for length in answer_lengths([sample]):
            metrics.mean("rollout/answer_tokens", length)
            metrics.max("rollout/answer_tokens_max", length)
            metrics.min("rollout/answer_tokens_min", length)
            metrics.sum("rollout/sampled_tokens", length)


def _plain(name: str) -> str:
    """A slash would be read as the border of an area."""
    return name.replace("/", ".")
