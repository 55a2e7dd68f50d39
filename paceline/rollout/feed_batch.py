"""From what a buffer gives to what a step learns from, with its numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        groups = [_changed(group, policy, _without_truncated) for group in groups]
    if config.partial == "mask":
        groups = [_changed(group, policy, newest_tokens) for group in groups]
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


def _changed(group: Group, policy: str, change: Callable[[Sample], Sample]) -> Group:
    """A copy in which the policy's samples are changed."""
    episodes = [
        replace(episode, samples=[change(s) if s.policy == policy else s for s in episode.samples])
        for episode in group.episodes
    ]
    return replace(group, episodes=episodes)


def _without_truncated(sample: Sample) -> Sample:
    """Out of the loss, if it was truncated."""
    is_out = sample.status is Status.TRUNCATED
    return _with_mask(sample, [False] * len(sample.tokens)) if is_out else sample


def newest_tokens(sample: Sample) -> Sample:
    """Only what the newest weights of the answer have made stays in the loss.

    Example: versions 3 3 3 4 4 -> mask 0 0 0 1 1.
    """
    newest = max(sample.versions)
    if newest == NO_VERSION:
        return sample
    pairs = zip(sample.mask, sample.versions, strict=True)
    return _with_mask(sample, [inside and version == newest for inside, version in pairs])


def _with_mask(sample: Sample, mask: list[bool]) -> Sample:
    """With another mask, outside of which there are no log-probs and versions."""
    return replace(
        sample,
        mask=mask,
        logprobs=[p if inside else 0.0 for p, inside in zip(sample.logprobs, mask, strict=True)],
        versions=[
            v if inside else NO_VERSION for v, inside in zip(sample.versions, mask, strict=True)
        ],
    )
