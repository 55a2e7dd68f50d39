"""What a critic learns: to predict the return that follows each token. arXiv 1707.06347, section 5.

    loss_t = 1/2 max((V_t - R_t)^2, (clip(V_t, V_old - value_clip, V_old + value_clip) - R_t)^2)
    loss   = sum_t weight_t loss_t                 the weights of the policy's loss

V_old are the values before the first update of the rollout: as with a policy's ratio, the clip acts
only when a rollout makes more than one update. R_t are the returns of `Credit.returns`.

Legend: N trained tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.algorithms.base import LossInputs, LossOutput
from paceline.algorithms.kl import finite_mean, nonfinite_share, token_mean
from paceline.algorithms.policy_gradient import given


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """Implements `paceline.algorithms.base.Objective` for the trainer of a critic."""

    value_clip: float | None = None
    """How far a value may move from what it was before the first update; None: any distance."""
    needs_reference: bool = False
    needs_teacher: bool = False
    teacher_top_k: int = 0
    needs_entropy_gradient: bool = False
    learns_by_advantage_alone: bool = False
    learns_from_rollouts: bool = True

    def loss(self, inputs: LossInputs) -> LossOutput:
        values_N = given(inputs.values_N, "values_N", "loss of the critic")
        returns_N = given(inputs.returns_N, "returns_N", "loss of the critic")
        error_N = values_N - returns_N
        square_N = error_N * error_N
        means = {
            "value": finite_mean(values_N),
            "return": finite_mean(returns_N),
            "value_error": finite_mean(error_N.abs()),
            "nonfinite_values": nonfinite_share(values_N),
        }
        if self.value_clip is not None:
            old_N = given(inputs.old_values_N, "old_values_N", "loss of the critic")
            held_N = old_N + (values_N - old_N).clamp(-self.value_clip, self.value_clip)
            held_square_N = (held_N - returns_N) * (held_N - returns_N)
            is_held_N = (held_square_N > square_N).to(square_N.dtype)
            means |= {"value_clip_fraction": token_mean(is_held_N)}
            square_N = square_N.maximum(held_square_N)
        return LossOutput((inputs.weights_N * square_N).sum() / 2, means)
