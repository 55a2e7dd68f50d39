"""What an episode earned, written into its samples: a reward, or the status that stands for one."""

from __future__ import annotations

import math

from paceline.rollout.env import Outcome
from paceline.rollout.outcomes import ALL_ROLES
from paceline.types import Sample, Status

ORIGINS = ("engine", "env", "reward")
"""A cause is `<origin>/<word>`."""


def award(sample: Sample, outcome: Outcome) -> Sample:
    """Give a sample its reward, or the status and cause that stand in for one, in place."""
    sample.reward_parts = dict(outcome.parts.get(sample.role, {}))
    if sample.status is Status.ABORTED:
        return sample
    status = outcome.status.get(sample.role, outcome.status.get(ALL_ROLES))
    reward = outcome.rewards.get(sample.role)
    if status is not None:
        sample.status = status
    if not sample.status.is_trainable:
        sample.cause, sample.detail = _split_cause(outcome.cause or f"env/{sample.status}")
    elif reward is None and not outcome.is_scored:
        _check_columns(sample)
    elif reward is None:
        sample.status = Status.UNSCORED
        sample.cause, sample.detail = _split_cause(outcome.cause or _no_reward(sample.role))
    elif not math.isfinite(reward):
        sample.status = Status.UNSCORED
        sample.cause, sample.detail = "env/nan" if math.isnan(reward) else "env/inf", ""
    else:
        sample.reward = float(reward)
        _check_columns(sample)
    return sample


def award_other(sample: Sample, outcome: Outcome) -> Sample:
    """Note in a sample that is not learned from what its role earned, if anything, in place.

    It has no cause: a failure of the episode is told by the samples that were to be learned from.
    """
    reward = outcome.rewards.get(sample.role)
    if reward is not None and math.isfinite(reward):
        sample.reward = float(reward)
        sample.reward_parts = dict(outcome.parts.get(sample.role, {}))
    sample.cause, sample.detail = None, ""
    return sample


def has_failed(outcome: Outcome) -> bool:
    """True if the episode failed as a whole."""
    status = outcome.status.get(ALL_ROLES)
    return status is not None and not status.is_trainable


def _no_reward(role: str) -> str:
    return f"env/none: the environment gave no reward for the role {role!r}"


def _check_columns(sample: Sample) -> None:
    try:
        sample.validate()
    except ValueError as exc:
        sample.status, sample.reward = Status.FAILED, None
        sample.cause, sample.detail = "engine/invalid", str(exc)


def _split_cause(text: str) -> tuple[str, str]:
    """`reward/timeout: no result` -> (`reward/timeout`, `no result`)."""
    word, _, detail = text.partition(": ")
    if word.partition("/")[0] in ORIGINS and "/" in word:
        return word, detail
    return "env/unscored", text
