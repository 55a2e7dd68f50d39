"""What algorithms share that learn from rollouts: settings, and the terms around their surrogate.

    loss = sum_t weight_t (-correction_t surrogate_t + kl_coef KL_t - entropy_coef H_t)

The surrogate is the algorithm's own; weights: `paceline.algorithms.reductions`; correction:
`paceline.algorithms.correction`; KL_t is that to the frozen reference: `paceline.algorithms.kl`.

pi_old are the trainer's own log-probs before the first update of the rollout; what the engine
reported (the behaviour) is compared with them in metrics, and used by the correction alone.

A non-finite log-ratio is counted in a metric, and a NaN one makes the loss NaN, upon which the
trainer skips the update: it is never replaced by a harmless number.

Legend: N trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Self, TypeVar

from pydantic import Field, model_validator

from paceline.algorithms.base import LossInputs, LossOutput, Objective
from paceline.algorithms.correction import Correction, check_behaviour, correction_weights
from paceline.algorithms.kl import (
    KlEstimator,
    finite_mean,
    kl_estimate,
    log_ratio,
    mismatch_means,
    nonfinite_share,
    token_mean,
)
from paceline.algorithms.reductions import LossMean, token_weights
from paceline.errors import TrainerError
from paceline.types import Config, Group

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.algorithms.kl import Mean

Column = TypeVar("Column")


class PolicyGradient(Config):
    """Settings of every algorithm that learns from rollouts."""

    kind: str
    """Which algorithm."""
    loss_mean: LossMean = "token"
    """Mean of the loss: `token` gives every token, `episode` every episode the same say;
    `constant` divides by the number of episodes times `constant_tokens`."""
    constant_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens an episode is divided by under `loss_mean = "constant"`, where it is required
    (usual: `rollout.sampling.max_tokens`); refused elsewhere."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence to the frozen reference (usual: 0.001 to 0.04). 0 loads no
    reference. In the loss, tokens of groups without variance still feel it."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of that KL: `k3` is never negative and has low variance; `k2` has the gradient of
    the reverse KL; `k1` has k1's value and k2's gradient, since its own gradient averages to
    nothing."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus: above 0 it rewards spread-out predictions."""
    correction: Correction | None = None
    """Importance weights against the engine's own log-probs; absent: none. Of use where
    `train/mismatch_kl` is large, or the engine's weights are older than the trainer's: with
    `schedule.max_staleness` above 0 set at least `correction.high = 2.0`."""

    @model_validator(mode="after")
    def _constant_has_its_tokens(self) -> Self:
        if self.loss_mean == "constant" and self.constant_tokens is None:
            raise ValueError(
                'loss_mean = "constant" needs constant_tokens, the number to divide by: '
                "set it, for instance to rollout.sampling.max_tokens"
            )
        if self.loss_mean != "constant" and self.constant_tokens is not None:
            raise ValueError(
                f'constant_tokens has no meaning under loss_mean = "{self.loss_mean}": '
                'remove it, or set loss_mean = "constant"'
            )
        return self

    @property
    def learns_from_rollouts(self) -> bool:
        return True

    @property
    def needs_reward(self) -> bool:
        return True

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def has_kl_in_loss(self) -> bool:
        """True if the KL to the reference is a term of the loss."""
        return self.kl_coef > 0

    @property
    def needs_old_logprobs(self) -> bool:
        return False

    @property
    def needs_teacher(self) -> bool:
        return False

    @property
    def teacher_top_k(self) -> int:
        return 0

    @property
    def needs_entropy_gradient(self) -> bool:
        return self.entropy_coef > 0

    @property
    def learns_by_advantage_alone(self) -> bool:
        return not (self.has_kl_in_loss or self.needs_entropy_gradient)

    @property
    def critic(self) -> Objective | None:
        return None

    @property
    def needs_final_values(self) -> bool:
        return False

    @property
    def min_group_size(self) -> int:
        return 1

    def token_weights(self, groups: Sequence[Group], policy: str) -> list[list[float]]:
        """Weights of the tokens; refuses samples that the correction can not work with."""
        if self.correction is not None:
            check_behaviour(groups, policy)
        return token_weights(groups, policy, self.loss_mean, self.constant_tokens)


def policy_gradient_loss(
    settings: PolicyGradient,
    inputs: LossInputs,
    surrogate_N: Tensor,
    means: dict[str, Mean],
) -> LossOutput:
    """The loss made of a surrogate to be maximised, shape [N], with all metrics.

    means: those of the surrogate. Raises TrainerError if the inputs lack a column.
    """
    means = dict(means)
    if settings.correction is not None:
        correction_N, found = correction_weights(inputs, settings.correction)
        surrogate_N = correction_N * surrogate_N
        means |= found
    log_ratio_N = log_ratio(inputs.logprobs_N, inputs.old_logprobs_N).detach()
    weights_N = inputs.weights_N.detach()
    means |= {
        "policy_loss": (-(weights_N * surrogate_N.detach()).sum(), weights_N.sum()),
        "approx_kl": finite_mean(kl_estimate(-log_ratio_N, "k3")),
        "nonfinite_log_ratio": nonfinite_share(log_ratio_N),
    }
    means = mismatch_means(inputs) | means  # a correction's own effective share comes first
    loss_N = -surrogate_N
    if settings.has_kl_in_loss:
        reference_N = given(
            inputs.reference_logprobs_N, "reference_logprobs_N", f"loss of {settings.kind}"
        )
        ratio_N = log_ratio(inputs.logprobs_N, reference_N)
        kl_N = kl_estimate(ratio_N, settings.kl_estimator)
        means["kl_reference"] = finite_mean(kl_N)
        means["nonfinite_reference_log_ratio"] = nonfinite_share(ratio_N)
        loss_N = loss_N + settings.kl_coef * kl_N
    if inputs.entropy_N is not None:
        means["entropy"] = token_mean(inputs.entropy_N)
    if settings.needs_entropy_gradient:
        entropy_N = given(inputs.entropy_N, "entropy_N", f"loss of {settings.kind}")
        loss_N = loss_N - settings.entropy_coef * entropy_N
    return LossOutput((inputs.weights_N * loss_N).sum(), means)


def given(column: Column | None, name: str, wanted_by: str) -> Column:
    """The column. Raises TrainerError if it is absent."""
    if column is None:
        raise TrainerError(
            f"the {wanted_by} needs {name}, and was not given it: whoever drives the algorithm "
            "must honour what it says it needs"
        )
    return column
