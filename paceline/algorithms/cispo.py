"""CISPO: a clipped importance weight on the log-prob. MiniMax-M1, arXiv 2506.13585, section 3.1.

PPO's clip takes tokens out of the gradient that moved far: often the rare ones that turn a train
of thought. Here the weight is held and the gradient stays. With rho = exp(log pi - log pi_old):

    surrogate = constant(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi

Advantages are those of GRPO. The value of this loss is that of a weighted log-likelihood; compare
rewards, not losses.

Legend: N trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from paceline.algorithms.base import Credit, LossInputs, LossOutput, Scores
from paceline.algorithms.group_credit import GroupRelative, credit_episodes
from paceline.algorithms.kl import bounded_ratio, finite_mean, log_ratio, token_mean
from paceline.algorithms.policy_gradient import policy_gradient_loss
from paceline.types import Group


class Cispo(GroupRelative):
    """`[algorithm]` with kind cispo: importance weights are clipped, gradients never."""

    kind: Literal["cispo"] = "cispo"
    """Which algorithm: `cispo` is `grpo` with a clipped weight in place of a clipped surrogate."""
    clip_low: Annotated[float, Field(ge=0, le=1)] | None = None
    """The weight is held at 1 minus this; absent, as in the paper: no lower bound."""
    clip_high: Annotated[float, Field(ge=0)] = 4.0
    """The weight is held at 1 plus this. Acts only when a rollout makes more than one update."""

    def credit(self, groups: Sequence[Group], policy: str, scores: Scores | None = None) -> Credit:
        """Every trained token of an episode gets the episode's advantage; 0 without variance."""
        return credit_episodes(groups, policy, self.compare)

    def loss(self, inputs: LossInputs) -> LossOutput:
        ratio_N = bounded_ratio(log_ratio(inputs.logprobs_N, inputs.old_logprobs_N)).detach()
        lowest = 0.0 if self.clip_low is None else 1 - self.clip_low
        held_N = ratio_N.clamp(lowest, 1 + self.clip_high)
        is_low_N, is_high_N = held_N > ratio_N, held_N < ratio_N
        means = {
            "ratio": finite_mean(ratio_N),
            "clip_fraction": token_mean((is_low_N | is_high_N).to(ratio_N.dtype)),
            "clip_fraction_low": token_mean(is_low_N.to(ratio_N.dtype)),
            "clip_fraction_high": token_mean(is_high_N.to(ratio_N.dtype)),
        }
        surrogate_N = held_N * inputs.advantages_N * inputs.logprobs_N
        return policy_gradient_loss(self, inputs, surrogate_N, means)
