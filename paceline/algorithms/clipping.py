"""The clipped surrogate of PPO, arXiv 1707.06347, section 3, and its dual clip, arXiv 1912.09729.

    surrogate = min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
    surrogate = max(surrogate, dual_clip A)  where A < 0, if dual_clip is set

It has no gradient where the clipped term is the smaller one: a token stops learning once its
ratio rho has moved far enough in the direction that its advantage A asks for.

Legend: N trained tokens of a micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from paceline.algorithms.kl import finite_mean, token_mean
from paceline.algorithms.policy_gradient import PolicyGradient

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.algorithms.kl import Mean


class Clipped(PolicyGradient):
    """Settings of the clip."""

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

    def surrogate(self, ratio_N: Tensor, advantages_N: Tensor) -> tuple[Tensor, dict[str, Mean]]:
        """`clipped_surrogate` with these settings."""
        return clipped_surrogate(
            ratio_N,
            advantages_N,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )


def clipped_surrogate(
    ratio_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Mean]]:
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
