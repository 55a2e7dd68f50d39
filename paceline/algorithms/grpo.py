"""GRPO: group-relative policy optimisation. DeepSeekMath, arXiv 2402.03300, section 4.1.

An episode's advantage is its reward against the other episodes of its prompt; no critic:

    A_i = (r_i - mean(r)) / (std(r) + 1e-6)        normalize = "std", unbiased std
    A_i = r_i - mean(r)                            normalize = "none"

Per trained token t, with rho = exp(log pi - log pi_old), log-ratio held within +-20:

    surrogate = min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
    surrogate = max(surrogate, dual_clip A)  where A < 0, if dual_clip is set (arXiv 1912.09729)
    loss_t    = -surrogate + kl_coef KL_t - entropy_coef H_t
    loss      = sum_t weight_t loss_t              weight: see paceline.algorithms.reductions

Known variants are settings of it. DAPO (arXiv 2503.14476): clip_high = 0.28, loss_mean = "token".
Dr. GRPO (arXiv 2503.20783): normalize = "none", loss_mean = "constant".

Legend: N trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from paceline.algorithms.base import Credit, LossInputs, LossOutput, Scores
from paceline.algorithms.clipping import Clipped
from paceline.algorithms.group_credit import GroupRelative, credit_episodes
from paceline.algorithms.kl import bounded_ratio, log_ratio
from paceline.algorithms.policy_gradient import policy_gradient_loss
from paceline.types import Group


class Grpo(Clipped, GroupRelative):
    """`[algorithm]` with kind grpo: rewards compared within the episodes of one prompt."""

    kind: Literal["grpo"] = "grpo"
    """Which algorithm: `grpo` compares the answers to one prompt with each other."""

    def credit(self, groups: Sequence[Group], policy: str, scores: Scores | None = None) -> Credit:
        """Every trained token of an episode gets the episode's advantage; 0 without variance."""
        return credit_episodes(groups, policy, self.compare)

    def loss(self, inputs: LossInputs) -> LossOutput:
        ratio_N = bounded_ratio(log_ratio(inputs.logprobs_N, inputs.old_logprobs_N))
        surrogate_N, means = self.surrogate(ratio_N, inputs.advantages_N)
        return policy_gradient_loss(self, inputs, surrogate_N, means)
