"""Numbers of a step's rollouts, over everything that was sampled and before anything is masked."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from paceline.observe.metrics import Metrics
from paceline.rollout.filters import answer_lengths, is_zero_variance, rewards_of
from paceline.types import Episode, Group, Sample, Status


def summarise(groups: Sequence[Group], policy: str) -> Metrics:
    """`rollout/...` of groups whose failures are settled and whose rewards are shaped.

    Where there are roles besides the policy's own name, each of its roles has numbers too, and so
    has each that does not learn.
    """
    metrics = Metrics()
    has_roles = any(
        episode.others or any(sample.role != sample.policy for sample in episode.samples)
        for group in groups
        for episode in group.episodes
    )
    for group in groups:
        if has_roles:
            _add_roles(metrics, group, policy)
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
    metrics.mean("rollout/all_correct", is_equal and min(rewards) > 0)
    metrics.mean("rollout/all_wrong", is_equal and max(rewards) <= 0)
    # Its sums are exact and slow; the deviation of equal rewards is known.
    spread = 0.0 if min(rewards) == max(rewards) else statistics.pstdev(rewards)
    metrics.mean("rollout/reward_group_std", spread)
    metrics.max("rollout/reward_max", max(rewards))
    metrics.min("rollout/reward_min", min(rewards))


def _add_samples(metrics: Metrics, group: Group, policy: str) -> None:
    for episode in group.episodes:
        for sample in episode.samples:
            if sample.policy == policy:
                _add_sample(metrics, sample, sample.cause or _cause_of_another(episode, sample))


def _cause_of_another(episode: Episode, sample: Sample) -> str | None:
    """What failed the episode, where that befell another role than the sample's."""
    found = (s.cause for s in episode.samples if s.role != sample.role and s.cause is not None)
    return next(found, None)


def _add_sample(metrics: Metrics, sample: Sample, failure: str | None) -> None:
    metrics.sum("rollout/samples", 1)
    if failure is not None:
        origin, _, cause = failure.partition("/")
        metrics.sum(f"rollout/failures/{origin}/{cause}", 1)
    metrics.mean("rollout/failed", failure is not None)
    if sample.status.is_trainable:
        _add_answers(metrics, sample)


def _add_answers(metrics: Metrics, sample: Sample) -> None:
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


def _add_roles(metrics: Metrics, group: Group, policy: str) -> None:
    """Of trainable episodes: what each role that spoke earned, and how much it said."""
    for episode in group.episodes:
        if not episode.is_trainable:
            continue
        spoke = [s for s in episode.samples if s.policy == policy] + episode.others
        for role in dict.fromkeys(sample.role for sample in spoke):
            samples = [sample for sample in spoke if sample.role == role]
            name = _plain(role)
            metrics.sum(f"rollout/role/{name}/episodes", 1)
            if samples[0].reward is not None:
                metrics.mean(f"rollout/role/{name}/reward", samples[0].reward)
            lengths = list(answer_lengths(samples))
            # A role without tokens spoke through an endpoint: a sample is an answer.
            metrics.mean(
                f"rollout/role/{name}/turns", len(lengths) or sum(not s.tokens for s in samples)
            )
            metrics.mean_of(f"rollout/role/{name}/answer_tokens", lengths)


def _plain(name: str) -> str:
    """A slash would be read as the border of an area."""
    return name.replace("/", ".")
