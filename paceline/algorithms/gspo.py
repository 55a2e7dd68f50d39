"""GSPO: group sequence policy optimisation. arXiv 2507.18071, equations 5 to 7.

GRPO with one ratio for a whole answer, the geometric mean of its tokens' ratios:

    s         = exp(mean over the row's trained tokens of (log pi - log pi_old))
    surrogate = min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)        the same for all tokens

The mean is held within +-20 after it is taken, so opposite log-ratios cancel. Ratios of sequences
lie close to 1, hence the narrow clip. With loss_mean = "episode", the default, the loss is the
paper's: each answer has the same say.

Several rows of one episode have a ratio each. Legend: N trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from paceline.algorithms.base import Credit, LossInputs, LossOutput, Scores
from paceline.algorithms.clipping import Clipped
from paceline.algorithms.group_credit import GroupRelative, credit_episodes
from paceline.algorithms.kl import bounded_ratio, log_ratio
from paceline.algorithms.policy_gradient import policy_gradient_loss
from paceline.algorithms.reductions import LossMean
from paceline.algorithms.sequences import row_means
from paceline.types import Group


class Gspo(Clipped, GroupRelative):
    """`[algorithm]` with kind gspo: one ratio for a whole answer."""

    kind: Literal["gspo"] = "gspo"
    """Which algorithm: `gspo` is `grpo` with one ratio for a whole answer."""
    loss_mean: LossMean = "episode"
    """Mean of the loss: `episode`, that of the paper, gives every episode the same say, `token`
    every token; `constant` divides by the number of episodes times `constant_tokens`."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 3e-4
    """How far the ratio of a whole answer may fall below 1 before it stops learning. Acts only when
    a rollout makes more than one update."""
    clip_high: Annotated[float, Field(ge=0)] = 4e-4
    """How far it may rise above 1."""

    def credit(self, groups: Sequence[Group], policy: str, scores: Scores | None = None) -> Credit:
        """Every trained token of an episode gets the episode's advantage; 0 without variance."""
        return credit_episodes(groups, policy, self.compare)

    def loss(self, inputs: LossInputs) -> LossOutput:
        log_ratio_N = log_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
        ratio_N = bounded_ratio(row_means(log_ratio_N, inputs))
        surrogate_N, means = self.surrogate(ratio_N, inputs.advantages_N)
        return policy_gradient_loss(self, inputs, surrogate_N, means)
