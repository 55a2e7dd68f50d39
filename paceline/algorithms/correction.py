"""Importance correction for engines whose log-probs differ from the trainer's.

Tokens are drawn from the engine's distribution mu (its kernels, its number format, weights that may
be older); the loss assumes the trainer's pi_old. With d_t = log pi_old - log mu of a trained token,
each term of the policy loss is multiplied by a constant w, its logarithm held within +-20:

    w = exp(d_t)                      level = "token"      biased, low variance
    w = exp(sum of d over the row)    level = "sequence"   unbiased without bounds, high variance
    w = exp(mean of d over the row)   level = "geometric"  biased, does not grow with the length

    min(w, high)                      mode = "truncate"    F. Yao et al. (2025),
                                                           https://fengyao.notion.site/off-policy-rl
    clip(w, low, high)                mode = "clip"
    w if low <= w <= high else 0      mode = "mask"        IcePop: arXiv 2510.18855

`veto` gives weight 0 to a whole row in which any exp(d_t) lies below it. Weights change numerators
only: the denominators of the mean stay, and so do the KL and the entropy term.

Weights are not normalised, so the variance of the gradient grows with mean(w^2), and n weights are
worth n / mean(w^2) samples, before their bounds: a share near 1 if engine and trainer agree.

Legend: N trained tokens of a micro-batch, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.algorithms.kl import bounded_ratio, log_ratio
from paceline.algorithms.sequences import over_rows, row_lengths, row_means, row_sums
from paceline.errors import TrainerError
from paceline.types import Config, Group

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.algorithms.base import LossInputs
    from paceline.algorithms.kl import Mean


class Correction(Config):
    """`[algorithm.correction]`: importance weights against what the engine reported."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """One weight for each token; or for each row the product (`sequence`) or the geometric mean of
    its tokens' weights."""
    mode: Literal["truncate", "clip", "mask"] = "truncate"
    """What happens out of bounds: `truncate` holds weights at `high`, `clip` holds them within
    `low` and `high`, `mask` takes the tokens out of the loss."""
    high: Annotated[float, Field(ge=1)]
    """Largest weight. Usual: 2 for `level = "token"`, 2 to 10 for `"sequence"`, 1.001 to 1.01 for
    `"geometric"`."""
    low: Annotated[float, Field(gt=0, le=1)] | None = None
    """Smallest weight; required by `mode = "clip"` and `"mask"`, refused by `"truncate"`. Usual:
    `1 / high`."""
    veto: Annotated[float, Field(gt=0, lt=1)] | None = None
    """A row in which the trainer finds any token less likely than the engine did by this factor is
    taken out of the loss (usual: 1e-4); absent: none is."""

    @model_validator(mode="after")
    def _bounds_fit_the_mode(self) -> Self:
        if self.mode == "truncate" and self.low is not None:
            raise ValueError(
                'mode = "truncate" has no lower bound: remove low, or set mode = "clip" or "mask"'
            )
        if self.mode != "truncate" and self.low is None:
            raise ValueError(
                f'mode = "{self.mode}" needs low, its lower bound: set it, for instance to 1 / high'
            )
        return self


def correction_weights(
    inputs: LossInputs, correction: Correction
) -> tuple[Tensor, dict[str, Mean]]:
    """The constant that multiplies each token's term, shape [N], and its metrics.

    Means are over weights: one for each token, or one for each row.
    """
    log_ratio_N = log_ratio(inputs.old_logprobs_N, inputs.behaviour_logprobs_N).detach()
    match correction.level:
        case "token":
            joined_N = log_ratio_N
        case "sequence":
            joined_N = over_rows(row_sums(log_ratio_N, inputs), inputs)
        case "geometric":
            joined_N = row_means(log_ratio_N, inputs)
    lengths_N = over_rows(row_lengths(inputs), inputs).to(log_ratio_N.dtype)
    shares_N = lengths_N.new_ones(lengths_N.shape)
    if correction.level != "token":
        shares_N = shares_N / lengths_N
    plain_N = bounded_ratio(joined_N)
    weights_N = _bounded(plain_N, correction)
    shares_N = shares_N * plain_N.isfinite()
    finite_N = plain_N.where(plain_N.isfinite(), plain_N.new_zeros(()))
    means = {
        "correction_bounded": ((shares_N * (weights_N != plain_N)).sum(), shares_N.sum()),
        "effective_sample_share": (shares_N.sum(), (shares_N * finite_N * finite_N).sum()),
    }
    if correction.veto is not None:
        is_low_N = (bounded_ratio(log_ratio_N) < correction.veto).to(plain_N.dtype)
        is_vetoed_N = over_rows(row_sums(is_low_N, inputs), inputs) > 0
        weights_N = weights_N.new_zeros(()).where(is_vetoed_N, weights_N)
        means["correction_vetoed"] = ((is_vetoed_N / lengths_N).sum(), (1 / lengths_N).sum())
    applied_N = weights_N.where(weights_N.isfinite(), weights_N.new_zeros(()))
    means["correction_weight"] = ((shares_N * applied_N).sum(), shares_N.sum())
    return weights_N, means


def check_behaviour(groups: Sequence[Group], policy: str) -> None:
    """Raise TrainerError if the samples lack the log-probs that a correction needs.

    Log-probs that are 0 for every trained token of a rollout were not reported: an engine that
    samples from anything but certainty gives others.
    """
    is_all_zero, num_trained = True, 0
    for sample in (sample for group in groups for sample in group.samples(policy)):
        if not sample.status.is_trainable or not any(sample.mask):
            continue
        place = f"prompt {sample.prompt_id!r}, episode {sample.episode}"
        if len(sample.logprobs) != len(sample.tokens):
            raise TrainerError(
                f"{place}: {len(sample.logprobs)} behaviour log-probs for {len(sample.tokens)} "
                "tokens; algorithm.correction needs one for each"
            )
        trained = [
            x for x, is_trained in zip(sample.logprobs, sample.mask, strict=True) if is_trained
        ]
        if not all(map(math.isfinite, trained)):
            raise TrainerError(
                f"{place}: a behaviour log-prob is not finite; algorithm.correction needs them all"
            )
        num_trained += len(trained)
        is_all_zero = is_all_zero and not any(trained)
    if num_trained and is_all_zero:
        raise TrainerError(
            f"the behaviour log-probs of all {num_trained} trained tokens are 0: the engine did "
            "not report them, and algorithm.correction needs them; remove the block"
        )


def _bounded(weights_N: Tensor, correction: Correction) -> Tensor:
    """NaN stays NaN."""
    low, high = correction.low or 0.0, correction.high
    if correction.mode != "mask":
        return weights_N.clamp(low, high)
    is_outside_N = (weights_N < low) | (weights_N > high)
    return weights_N.new_zeros(()).where(is_outside_N, weights_N)
