"""On-policy distillation: on the student's own answers, towards a teacher. arXiv 2306.13649.

Per trained token, with d = log pi - log teacher of the sampled token, held within +-20:

    top_k = 0     A_t = -constant(d_t),  surrogate = the clipped surrogate of rho and A
                  gradient: that of KL(pi||teacher) at each position, estimated from one token
    top_k = K     surrogate = -KL_t over the teacher's K most likely tokens and the rest of the
                  vocabulary as one more, exact and differentiated:

                  sum_k p_k (log p_k - log q_k)    top_k_weights = "student", KL(pi||teacher)
                  sum_k q_k (log q_k - log p_k)    top_k_weights = "teacher", KL(teacher||pi)

Joining the rest into one keeps the KL non-negative, 0 only where all K + 1 probabilities are equal,
and never above that over the whole vocabulary; without the rest a student could put its
probability elsewhere.

Rewards may take part: reward_coef times GRPO's advantage of the episode is added to A_t.

The log-probs of student and teacher are those at the sampling temperature.
Legend: N trained tokens of a micro-batch, K tokens of the teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.algorithms.base import Credit, LossInputs, LossOutput, Scores
from paceline.algorithms.clipping import Clipped
from paceline.algorithms.group_credit import GroupRelative, count_episodes, credit_episodes
from paceline.algorithms.kl import (
    MAX_LOG_RATIO,
    bounded_ratio,
    finite_mean,
    log_ratio,
    nonfinite_share,
)
from paceline.algorithms.policy_gradient import given, policy_gradient_loss
from paceline.algorithms.trajectories import empty_columns
from paceline.types import Group

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST_REST = 1e-6
"""The rest of the vocabulary counts with at least this probability: below it, 1 - sum(p) is
rounding."""


class Distill(Clipped, GroupRelative):
    """`[algorithm]` with kind distill: a teacher grades each token of the student's own answers."""

    kind: Literal["distill"] = "distill"
    """Which algorithm: `distill` moves the policy towards a teacher, on its own answers."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """How many of the teacher's most likely tokens are compared at each position (usual: 16 to
    100); 0 compares the sampled token alone, which any teacher can score."""
    top_k_weights: Literal["student", "teacher"] = "student"
    """With `top_k`: by whose probabilities differences are weighted. `student` seeks one of the
    teacher's modes (reverse KL), `teacher` covers all of them (forward KL)."""
    reward_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the rewards, compared within a prompt's answers as `grpo` does; 0 needs none."""

    @model_validator(mode="after")
    def _correction_fits(self) -> Self:
        if self.top_k and self.correction is not None:
            raise ValueError(
                "correction weighs sampled tokens, but top_k sums over tokens by their "
                "probabilities: remove correction, or set top_k = 0"
            )
        return self

    @property
    def needs_reward(self) -> bool:
        return self.reward_coef > 0

    @property
    def needs_teacher(self) -> bool:
        return True

    @property
    def teacher_top_k(self) -> int:
        return self.top_k

    @property
    def learns_by_advantage_alone(self) -> bool:
        return False

    @property
    def min_group_size(self) -> int:
        return 2 if self.reward_coef > 0 else 1

    def credit(self, groups: Sequence[Group], policy: str, scores: Scores | None = None) -> Credit:
        """What rewards say of each token; the teacher's part is added in the loss."""
        if self.reward_coef > 0:
            return credit_episodes(groups, policy, self._scaled)
        return Credit(empty_columns(groups, policy), metrics=count_episodes(groups, policy))

    def loss(self, inputs: LossInputs) -> LossOutput:
        ratio_N = bounded_ratio(log_ratio(inputs.logprobs_N, inputs.old_logprobs_N))
        if self.top_k:
            kl_N = top_k_kl(
                given(inputs.top_logprobs_NK, "top_logprobs_NK", "loss of distill"),
                given(inputs.teacher_top_logprobs_NK, "teacher_top_logprobs_NK", "loss of distill"),
                self.top_k_weights,
            )
            surrogate_N, means = self.surrogate(ratio_N, inputs.advantages_N)
            surrogate_N = surrogate_N - kl_N
        else:
            teacher_N = given(inputs.teacher_logprobs_N, "teacher_logprobs_N", "loss of distill")
            kl_N = log_ratio(inputs.logprobs_N, teacher_N).detach()
            held_N = kl_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            surrogate_N, means = self.surrogate(ratio_N, inputs.advantages_N - held_N)
        means["kl_teacher"] = finite_mean(kl_N)
        means["nonfinite_teacher"] = nonfinite_share(kl_N)
        return policy_gradient_loss(self, inputs, surrogate_N, means)

    def _scaled(self, rewards_G: list[float]) -> list[float]:
        return [self.reward_coef * advantage for advantage in self.compare(rewards_G)]


def top_k_kl(
    student_NK: Tensor, teacher_NK: Tensor, weights: Literal["student", "teacher"]
) -> Tensor:
    """KL over K tokens and the rest as one more, shape [N], from the log-probs of the K.

    `student`: KL(student||teacher); `teacher`: KL(teacher||student). Differentiable in both.
    """
    p_rest_N, q_rest_N = _rest(student_NK), _rest(teacher_NK)
    gap_NK, gap_rest_N = log_ratio(student_NK, teacher_NK), p_rest_N.log() - q_rest_N.log()
    if weights == "student":
        return (student_NK.exp() * gap_NK).sum(-1) + p_rest_N * gap_rest_N
    return -(teacher_NK.exp() * gap_NK).sum(-1) - q_rest_N * gap_rest_N


def _rest(logprobs_NK: Tensor) -> Tensor:
    """Probability of all other tokens, shape [N]."""
    return (1 - logprobs_NK.exp().sum(-1)).clamp(min=SMALLEST_REST)
