"""Advantages from the rewards of a group: pure functions over one reward per episode.

    centred         A_i = r_i - mean(r)
    standardised    A_i = (r_i - mean(r)) / (std(r) + 1e-6),  std unbiased: divided by n - 1
    leave_one_out   A_i = r_i - mean of the other r_j          arXiv 2402.14740, section 3.3

and over all trained tokens of a rollout:

    whitened        A_t = (x_t - mean(x)) / (std(x) + 1e-6),  std unbiased

Sums are exact (`math.fsum`), so the order of the episodes changes nothing.
Legend: G episodes of a group that can be trained on; N trained tokens of a rollout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.errors import RewardError
from paceline.types import Episode

STD_EPS = 1e-6
"""Keeps nearly equal rewards from being blown up."""

FLOAT32_EPS = 2.0**-23
"""Rewards that differ by less than float32 can tell are equal: the sum of a few parts, or a model
that scores in float32, is not more exact than that."""


def has_zero_variance(rewards_G: Sequence[float]) -> bool:
    """True if the rewards are equal up to float32's rounding, so that nothing can be learned.

    NaN is equal to nothing: it is not hidden by an advantage of 0.
    """
    if not rewards_G:
        return True
    if any(map(math.isnan, rewards_G)):
        return False
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


def leave_one_out(rewards_G: Sequence[float]) -> list[float]:
    """r_i - mean of the others; exactly 0.0 if the rewards have no variance.

    Written as G / (G - 1) (r_i - mean(r)), which is the same.
    Example: [1, 0, 0] -> [1, -0.5, -0.5].
    """
    size = len(rewards_G)
    return [c * (size / (size - 1)) if c else 0.0 for c in centred(rewards_G)]


def whitened(values_N: Sequence[float]) -> list[float]:
    """(x - mean(x)) / (unbiased std(x) + 1e-6); exactly 0.0 without variance, so for one value."""
    return standardised(values_N)


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
