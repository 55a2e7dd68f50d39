"""The KL to the reference as a part of the reward, token by token.

    r_t = -kl_coef KL_t + [t is the last trained token] reward

KL_t is an estimate from d_t = log pi_old - log pi_ref, held within +-20 and not differentiated (a
NaN stays one): the policy gradient of this reward is that of the reverse KL, for which k1 has no
bias. In the loss instead (`kl_in = "loss"`), see `paceline.algorithms.kl`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from paceline.algorithms.base import Scores
from paceline.algorithms.kl import MAX_LOG_RATIO, KlEstimator
from paceline.algorithms.policy_gradient import PolicyGradient, given
from paceline.algorithms.trajectories import empty_columns, trajectories
from paceline.observe.metrics import Metrics
from paceline.types import Group


class RewardKl(PolicyGradient):
    """Settings of algorithms that may take the KL off the reward."""

    kl_in: Literal["reward", "loss"] = "reward"
    """Where the KL to the reference acts: taken off the `reward` of each token, so that it shares
    baseline and whitening; or as a term of the `loss`. Never both."""
    kl_estimator: KlEstimator = "k1"
    """Estimator of that KL. In the reward, `k1` is without bias and `k2` and `k3` have less
    variance; in the loss, `k1` and `k2` have the gradient of the reverse KL, and `k3` is never
    negative."""

    @property
    def has_kl_in_reward(self) -> bool:
        """True if `credit` takes the KL off the reward."""
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def has_kl_in_loss(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "loss"

    @property
    def needs_old_logprobs(self) -> bool:
        return self.has_kl_in_reward

    def penalties(
        self, groups: Sequence[Group], policy: str, scores: Scores | None, metrics: Metrics
    ) -> list[list[float]]:
        """kl_coef KL_t per sample and token; 0 without a KL in the reward.

        Raises TrainerError if the log-probs that it is made of are absent.
        """
        columns = empty_columns(groups, policy)
        if not self.has_kl_in_reward:
            return columns
        wanted_by = f"credit of {self.kind}, which has a KL in the reward,"
        scores = scores or Scores()
        old = given(scores.old_logprobs, "old_logprobs", wanted_by)
        reference = given(scores.reference_logprobs, "reference_logprobs", wanted_by)
        for path in trajectories(groups, policy):
            gaps_T = [p - q for p, q in zip(path.read(old), path.read(reference), strict=True)]
            kl_T = [kl_number(gap, self.kl_estimator) for gap in gaps_T]
            metrics.mean("train/kl_reward", math.fsum(filter(math.isfinite, kl_T)), len(kl_T))
            metrics.sum("train/nonfinite_kl_rewards", sum(not math.isfinite(gap) for gap in gaps_T))
            path.write(columns, [self.kl_coef * kl for kl in kl_T])
        return columns


def kl_number(log_ratio: float, estimator: KlEstimator) -> float:
    """KL(p||q) of one token from d = log p - log q, held within +-20."""
    if math.isnan(log_ratio):
        return log_ratio
    d = max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, log_ratio))
    match estimator:
        case "k1":
            return d
        case "k2":
            return d * d / 2
        case "k3":
            return math.exp(-d) - 1 + d
