"""What becomes of sampled groups before anybody trains on them: the same for every driver."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from paceline.errors import RolloutError
from paceline.rollout.filters import all_failed, drop_reason, settle_failures, shape_overlong
from paceline.rollout.settings import OnFailure, RolloutConfig
from paceline.types import Group, Sample

logger = logging.getLogger(__name__)

MAX_NAMED = 3
"""Failed samples that a log line names per cause."""


class FailurePolicy(Protocol):
    """What a failed reward means; `rollout.rewards.Reward`."""

    @property
    def on_failure(self) -> OnFailure:
        """As in `[reward]`."""


def settle(
    groups: Sequence[Group],
    policies: Iterable[str],
    *,
    config: RolloutConfig,
    reward: FailurePolicy | None,
    step: int,
) -> list[dict[str, str | None]]:
    """Settle failures and shape rewards, in place; for each group: policy -> reason to drop it.

    A group may be dropped for one policy and kept for another. The reasons are `failed` and
    `zero_variance`; None keeps it. Raises RewardError or RolloutError where a failure ends the run.
    """
    _log_failures(groups, step)
    names = list(policies)
    on_failure: OnFailure = "drop_sample" if reward is None else reward.on_failure
    settled = []
    for group in groups:
        reason = settle_failures(group, on_failure)
        shape_overlong(group, config)
        settled.append({name: reason or drop_reason(group, name, config) for name in names})
    return settled


def is_absent(group: Group, policy: str) -> bool:
    """True if the policy has no sample in any trainable episode of the group."""
    return not any(
        sample.policy == policy
        for episode in group.episodes
        if episode.is_trainable
        for sample in episode.samples
    )


class Streaks:
    """Ends a run that only drops groups: counts what was dropped in a row.

    Raises RewardError or RolloutError if `wave` groups in a row had no trainable episode, and
    RolloutError if as many were dropped for a policy as `rollout.max_refills` waves and the
    first one hold.
    """

    def __init__(self, wave: int, max_refills: int, policies: Iterable[str]) -> None:
        self._wave = wave
        self._most_dropped = wave * (max_refills + 1)
        self._failed: list[Group] = []
        self._dropped: dict[str, Counter[str]] = {name: Counter() for name in policies}

    def add(self, group: Group | None, reasons: Mapping[str, str | None], step: int) -> None:
        """Count one group; None if it was not sampled to its end."""
        if group is not None:
            is_trainable = any(episode.is_trainable for episode in group.episodes)
            self._failed = [] if is_trainable else [*self._failed, group]
            # A reward that fails every time would fail for every further group too.
            if len(self._failed) >= self._wave:
                raise all_failed(self._failed, step)
        for policy, reason in reasons.items():
            if reason is None:
                self._dropped[policy].clear()
                continue
            self._dropped[policy][reason] += 1
            if self._dropped[policy].total() >= self._most_dropped:
                raise RolloutError(self._nothing_left(policy, step))

    def _nothing_left(self, policy: str, step: int) -> str:
        counts = self._dropped[policy]
        found = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
        return (
            f"step {step}: none of {counts.total()} groups in a row can be trained on by policy "
            f"{policy!r}: {found}. Take easier or harder prompts, more "
            "rollout.samples_per_prompt, a higher rollout.sampling.temperature, or more "
            "rollout.max_refills"
        )


def _log_failures(groups: Sequence[Group], step: int) -> None:
    """One line for each cause, with the first samples it befell."""
    by_cause: dict[str, list[Sample]] = {}
    for sample in (sample for group in groups for sample in group.samples()):
        if sample.cause is not None:
            by_cause.setdefault(sample.cause, []).append(sample)
    for cause, samples in by_cause.items():
        named = ", ".join(f"{s.prompt_id}/{s.episode}" for s in samples[:MAX_NAMED])
        detail = samples[0].detail.partition("\n")[0]
        logger.warning(
            "step %d: %d samples failed by %s (%s%s): %s",
            step, len(samples), cause, named, ", ..." if len(samples) > MAX_NAMED else "", detail,
        )  # fmt: skip
