"""A baseline for each role that is made of what the role earned before.

    b_i = mean              of the role's earlier rewards
    b_i = mean of the other rewards of the role in this rollout        if it has none yet
    A_i = r_i - b_i

after a rollout in which the role earned n rewards of mean m, with c rewards seen before:

    mean += n / (c + n) (m - mean),    c = min(c + n, baseline_window)

so the mean is that of all rewards at first, and later forgets: a rollout of n rewards then has the
share n / (baseline_window + n). A baseline never holds the reward that it is compared with, so it
brings no bias, and one answer a prompt will do.

Sums are exact (`math.fsum`) and taken over whole rollouts: order changes nothing.
Legend: E episodes of a rollout in which the role spoke.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from paceline.algorithms.advantages import leave_one_out
from paceline.algorithms.base import Baselines, Scores
from paceline.algorithms.policy_gradient import PolicyGradient, given
from paceline.algorithms.trajectories import Trajectory
from paceline.observe.metrics import Metrics


class RunningBaseline(PolicyGradient):
    """Settings of algorithms that may compare rewards with a role's earlier ones."""

    baseline_window: Annotated[int, Field(ge=1)] = 512
    """For `baseline = "running"`: about how many of a role's latest rewards its baseline is the
    mean of. Larger is steadier, smaller follows faster; it is at least one rollout."""

    def compare_with_past(
        self,
        paths: Sequence[Trajectory],
        rewards: Sequence[float],
        scores: Scores | None,
        metrics: Metrics,
    ) -> tuple[list[float], Baselines]:
        """What each trajectory earned above its role's baseline, and the baselines after it.

        Raises TrainerError without scores: they hold the baselines of the rollout before.
        """
        given_baselines = None if scores is None else scores.baselines
        before = given(given_baselines, "baselines", f"credit of {self.kind}")
        advantages, after = [0.0] * len(paths), dict(before)
        for role in sorted({path.role for path in paths}):
            indices = [index for index, path in enumerate(paths) if path.role == role]
            rewards_E = [rewards[index] for index in indices]
            mean, count = before.get(role, (0.0, 0))
            if count:
                metrics.mean(f"train/baseline/{role.replace('/', '.')}", mean)
                found = [reward - mean for reward in rewards_E]
            else:
                found = leave_one_out(rewards_E)
            for index, advantage in zip(indices, found, strict=True):
                advantages[index] = advantage
            after[role] = _updated(mean, count, rewards_E, self.baseline_window)
        return advantages, after


def _updated(mean: float, count: int, rewards_E: Sequence[float], window: int) -> tuple[float, int]:
    """A reward that is not finite, made so by a broken KL, would spoil all that follow."""
    finite = [reward for reward in rewards_E if math.isfinite(reward)]
    if not finite:
        return mean, count
    num = len(finite)
    step = num / (count + num) * (math.fsum(finite) / num - mean)
    return mean + step, min(count + num, window)
