"""GRPO: group-relative policy optimisation. DeepSeekMath, arXiv 2402.03300, section 4.1.

An episode's advantage is its reward against the other episodes of its prompt; no critic:

    A_i = (r_i - mean(r)) / (std(r) + 1e-6)        normalize = "std", unbiased std
    A_i = r_i - mean(r)                            normalize = "none"

Per trained token t, with rho = exp(log pi - log pi_old), log-ratio held within +-20:

    surrogate = min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
    surrogate = max(surrogate, dual_clip A)  where A < 0, if dual_clip is set (arXiv 1912.09729)
    loss_t    = -surrogate + kl_coef KL_t - entropy_coef H_t
    loss      = sum_t weight_t loss_t              weight: see paceline.algorithms.reductions

pi_old are the trainer's own log-probs before the first update of the rollout; what the engine
reported (the behaviour) is compared with them in metrics only. KL_t is that to the frozen
reference, see paceline.algorithms.kl.

Known variants are settings of it. DAPO (arXiv 2503.14476): clip_high = 0.28, loss_mean = "token".
Dr. GRPO (arXiv 2503.20783): normalize = "none", loss_mean = "constant".

A non-finite log-ratio is counted in a metric, and a NaN one makes the loss NaN, upon which the
trainer skips the update: it is never replaced by a harmless number.

Legend: N trainable tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.algorithms.advantages import centred, credit_episodes, standardised
from paceline.algorithms.base import Credit, LossInputs, LossOutput, Scores
from paceline.algorithms.kl import (
    KlEstimator,
    bounded_ratio,
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


class Grpo(Config):
    """`[algorithm]` with kind grpo: rewards compared within the episodes of one prompt."""

    kind: Literal["grpo"] = "grpo"
    """Which algorithm: `grpo` compares the answers to one prompt with each other."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """How far the ratio of new to old probability may fall below 1 before a token stops learning.
    Acts only when a rollout makes more than one update (`trainer.updates_per_step`,
    `trainer.epochs_per_step`)."""
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """How far the ratio may rise above 1; larger than `clip_low` keeps rare tokens alive (DAPO
    takes 0.28)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio that a token with a negative advantage counts with (usual: 3); absent: no
    bound. Guards against off-policy tokens that became much more likely."""
    normalize: Literal["std", "none"] = "std"
    """`std` divides the centred rewards of a group by their unbiased standard deviation plus 1e-6;
    `none` only centres them, so that easy and hard prompts keep their own scale."""
    loss_mean: LossMean = "token"
    """Mean of the loss: `token` gives every token, `episode` every episode the same say;
    `constant` divides by the number of episodes times `constant_tokens`."""
    constant_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens an episode is divided by under `loss_mean = "constant"`, where it is required
    (usual: `rollout.sampling.max_tokens`); refused elsewhere."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence to the frozen reference in the loss (usual: 0.001 to 0.04). 0
    loads no reference. Tokens of groups without variance still feel it."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of that KL: `k3` is never negative and has low variance; `k2` has the gradient of
    the reverse KL; `k1` has k1's value and k2's gradient, since its own gradient averages to
    nothing."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus: above 0 it rewards spread-out predictions."""

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
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def needs_critic(self) -> bool:
        return False

    @property
    def needs_entropy_gradient(self) -> bool:
        return self.entropy_coef > 0

    @property
    def learns_from_rollouts(self) -> bool:
        return True

    @property
    def min_group_size(self) -> int:
        return 2

    def credit(self, groups: Sequence[Group], policy: str, scores: Scores | None = None) -> Credit:
        """Every trained token of an episode gets the episode's advantage; 0 without variance."""
        return credit_episodes(groups, policy, standardised if self.normalize == "std" else centred)

    def token_weights(self, groups: Sequence[Group], policy: str) -> list[list[float]]:
        return token_weights(groups, policy, self.loss_mean, self.constant_tokens)

    def loss(self, inputs: LossInputs) -> LossOutput:
        log_ratio_N = log_ratio(inputs.logprobs_N, inputs.old_logprobs_N)
        surrogate_N, means = clipped_surrogate(
            bounded_ratio(log_ratio_N),
            inputs.advantages_N,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        weights_N = inputs.weights_N.detach()
        means |= {
            "policy_loss": (-(weights_N * surrogate_N.detach()).sum(), weights_N.sum()),
            "approx_kl": finite_mean(kl_estimate(-log_ratio_N.detach(), "k3")),
            "nonfinite_log_ratio": nonfinite_share(log_ratio_N),
        }
        means |= mismatch_means(inputs)
        loss_N = -surrogate_N
        if self.needs_reference:
            kl_N = self._reference_kl(inputs, means)
            loss_N = loss_N + self.kl_coef * kl_N
        if inputs.entropy_N is not None:
            means["entropy"] = token_mean(inputs.entropy_N)
        if self.needs_entropy_gradient:
            loss_N = loss_N - self.entropy_coef * _given(inputs.entropy_N, "entropy_N")
        return LossOutput((inputs.weights_N * loss_N).sum(), means)

    def _reference_kl(self, inputs: LossInputs, means: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        reference_N = _given(inputs.reference_logprobs_N, "reference_logprobs_N")
        log_ratio_N = log_ratio(inputs.logprobs_N, reference_N)
        kl_N = kl_estimate(log_ratio_N, self.kl_estimator)
        means["kl_reference"] = finite_mean(kl_N)
        means["nonfinite_reference_log_ratio"] = nonfinite_share(log_ratio_N)
        return kl_N


def clipped_surrogate(
    ratio_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """The objective to be maximised, shape [N], and what the clip did, as (sum, weight).

    clip_fraction: share of tokens where the clipped term is the smaller one, split into
    clip_fraction_low (A < 0, ratio fell) and clip_fraction_high (A > 0, ratio rose).
    """
    plain_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    is_clipped_N = (clipped_N < plain_N).to(ratio_N.dtype)
    surrogate_N = plain_N.minimum(clipped_N)
    means = {
        "ratio": finite_mean(ratio_N),
        "clip_fraction": token_mean(is_clipped_N),
        "clip_fraction_low": token_mean(is_clipped_N * (advantages_N < 0)),
        "clip_fraction_high": token_mean(is_clipped_N * (advantages_N > 0)),
    }
    if dual_clip is not None:
        floor_N = dual_clip * advantages_N
        is_floored_N = (advantages_N < 0) & (surrogate_N < floor_N)
        surrogate_N = floor_N.where(is_floored_N, surrogate_N)
        means["dual_clip_fraction"] = token_mean(is_floored_N.to(ratio_N.dtype))
    return surrogate_N, means


def _given(column_N: Tensor | None, name: str) -> Tensor:
    if column_N is None:
        raise TrainerError(
            f"the loss of grpo needs {name}, which the trainer did not give: it must honour "
            "needs_reference and needs_entropy_gradient"
        )
    return column_N
