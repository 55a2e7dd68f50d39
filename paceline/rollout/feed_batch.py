"""From what a buffer gives to what a step learns from, with its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.observe.metrics import Metrics
from paceline.rollout.batch import RolloutBatch
from paceline.rollout.feed_seams import TakenGroups
from paceline.rollout.settings import RolloutConfig
from paceline.rollout.summary import summarise
from paceline.types import NO_VERSION, Group, Sample, Status


def batch_of(
    taken: TakenGroups,
    policy: str,
    config: RolloutConfig,
    *,
    batch: int,
    can_drop_oldest: bool,
    has_stragglers: bool,
    max_staleness: int,
    lost_tokens: int,
) -> RolloutBatch:
    """The batch of one policy. Groups are shared with other policies and left as they are."""
    dropped = [(lost.group, lost.reason) for lost in taken.dropped if lost.group is not None]
    sampled = [*taken.groups, *(group for group, _ in dropped)]
    metrics = summarise(sorted(sampled, key=lambda group: group.draw), policy)
    metrics.sum("rollout/groups", len(taken.groups))
    metrics.sum("rollout/missing_groups", batch - len(taken.groups))
    reasons = [lost.reason for lost in taken.dropped]
    expected = {"failed", "zero_variance"}
    expected |= {"oldest"} if can_drop_oldest else set()
    expected |= {"straggler"} if has_stragglers else set()
    for reason in expected | set(reasons):
        metrics.sum(f"rollout/dropped_groups/{reason}", reasons.count(reason))
    if has_stragglers:
        metrics.sum("rollout/stragglers", taken.num_stragglers)
    if max_staleness > 0 or can_drop_oldest:
        metrics.sum("rollout/lost_tokens", lost_tokens)
    _add_staleness(metrics, taken.staleness, max_staleness)
    _add_versions(metrics, taken.groups, policy)
    metrics.max("rollout/buffer_groups", taken.num_ready)
    groups = taken.groups
    if config.truncated == "mask":
        groups = [_masked(group, policy) for group in groups]
    # A list of its own: whoever has learned from the groups clears it.
    lost = [(one.ordinal, one.prompt, one.reason) for one in taken.dropped if one.group is None]
    return RolloutBatch(
        list(groups), metrics, dropped, is_exhausted=taken.is_exhausted, lost=lost
    )  # fmt: skip


def _add_staleness(metrics: Metrics, staleness: Sequence[int], max_staleness: int) -> None:
    metrics.mean_of("rollout/staleness", staleness)
    if staleness:
        metrics.max("rollout/staleness_max", max(staleness))
    for steps in range(max_staleness + 1):
        metrics.mean_of(f"rollout/staleness_share/{steps}", [s == steps for s in staleness])


def _add_versions(metrics: Metrics, groups: Sequence[Group], policy: str) -> None:
    """How many answers are of several weights, and of how many nobody knows of which."""
    for sample in (sample for group in groups for sample in group.samples(policy)):
        versions = {v for v, is_own in zip(sample.versions, sample.mask, strict=True) if is_own}
        if versions:
            metrics.mean("rollout/mixed_versions", len(versions - {NO_VERSION}) > 1)
            metrics.mean("rollout/unknown_versions", NO_VERSION in versions)
        metrics.sum("rollout/interruptions", sample.interruptions)


def _masked(group: Group, policy: str) -> Group:
    """A copy in which the truncated answers of the policy are out of the loss."""
    episodes = [
        replace(episode, samples=[_masked_sample(s, policy) for s in episode.samples])
        for episode in group.episodes
    ]
    return replace(group, episodes=episodes)


def _masked_sample(sample: Sample, policy: str) -> Sample:
    if sample.policy != policy or sample.status is not Status.TRUNCATED:
        return sample
    length = len(sample.tokens)
    return replace(
        sample, mask=[False] * length, logprobs=[0.0] * length, versions=[NO_VERSION] * length
    )
