"""Numbers of a step's rollouts, over everything that was sampled and before anything is masked."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from paceline.observe.metrics import Metrics
from paceline.rollout.filters import answer_lengths, are_equal, rewards_by_role
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
    rewards: list[float] = []
    for group in groups:
        if has_roles:
            _add_roles(metrics, group, policy)
        rewards += _add_rewards(metrics, group, policy)
        _add_samples(metrics, group, policy)
        for episode in group.episodes:
            for name, value in episode.metrics.items():
                metrics.mean(f"rollout/env/{_plain(name)}", value)
    if rewards:
        metrics.mean("rollout/reward_std", statistics.pstdev(rewards))
    return metrics


def _add_rewards(metrics: Metrics, group: Group, policy: str) -> list[float]:
    """Returns the rewards."""
    found = rewards_by_role(group, policy)
    rewards = [reward for _, reward in found]
    metrics.mean_of("rollout/reward", rewards)
    if not rewards:
        return rewards
    is_equal = are_equal(found)
    metrics.mean("rollout/zero_variance", is_equal)
    metrics.mean("rollout/all_correct", is_equal and min(rewards) > 0)
    metrics.mean("rollout/all_wrong", is_equal and max(rewards) <= 0)
    # Its sums are exact and slow; the deviation of equal rewards is known.
    spread = 0.0 if min(rewards) == max(rewards) else statistics.pstdev(rewards)
    metrics.mean("rollout/reward_group_std", spread)
    metrics.max("rollout/reward_max", max(rewards))
    metrics.min("rollout/reward_min", min(rewards))
    return rewards


def _add_samples(metrics: Metrics, group: Group, policy: str) -> None:
    """Counted for the group first: a step has many samples, and a dozen numbers of each."""
    samples = list(group.samples(policy))
    failures = [
        sample.cause or _cause_of_another(episode, sample)
        for episode in group.episodes
        for sample in episode.samples
        if sample.policy == policy
    ]
    causes = Counter(cause for cause in failures if cause is not None)
    for failure, count in causes.items():
        origin, _, cause = failure.partition("/")
        metrics.sum(f"rollout/failures/{origin}/{cause}", count)
    if samples:
        metrics.sum("rollout/samples", len(samples))
        metrics.mean("rollout/failed", causes.total(), len(samples))
    _add_answers(metrics, [sample for sample in samples if sample.status.is_trainable])


def _cause_of_another(episode: Episode, sample: Sample) -> str | None:
    """What failed the episode, where that befell another role than the sample's."""
    found = (s.cause for s in episode.samples if s.role != sample.role and s.cause is not None)
    return next(found, None)


def _add_answers(metrics: Metrics, samples: Sequence[Sample]) -> None:
    if samples:
        metrics.mean_of("rollout/truncated", [s.status is Status.TRUNCATED for s in samples])
    for sample in samples:
        for name, value in sample.reward_parts.items():
            metrics.mean(f"rollout/reward_part/{_plain(name)}", value)
    lengths = list(answer_lengths(samples))
    if lengths:
        starts = [sample.mask.index(True) for sample in samples if True in sample.mask]
        metrics.mean_of("rollout/prompt_tokens", starts)
        metrics.mean_of("rollout/answer_tokens", lengths)
        metrics.max("rollout/answer_tokens_max", max(lengths))
        metrics.min("rollout/answer_tokens_min", min(lengths))
        metrics.sum("rollout/sampled_tokens", sum(lengths))


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
