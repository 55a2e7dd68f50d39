"""Log-ratios of two policies on sampled tokens: importance ratios, KL estimators, their means.

KL estimators, J. Schulman, "Approximating KL Divergence" (2020,
http://joschu.net/blog/kl-approx.html). For tokens drawn from p and d = log p - log q, each has the
mean KL(p||q) (k2 up to third order in d):

    k1 = d            unbiased, high variance, may be negative
    k2 = d^2 / 2      biased, low variance
    k3 = exp(-d) - 1 + d      unbiased, low variance, never negative

Only tensor methods are used, so that a run file is checked without torch. Types narrower than 32
bits are widened before anything is subtracted: exp(20) does not fit into float16.

Legend: N trainable tokens of a micro-batch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.algorithms.base import LossInputs

    Mean = tuple[Tensor, Tensor]

KlEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within this bound before `exp`; exp(20) is about 4.9e8."""


def log_ratio(logprobs_N: Tensor, other_logprobs_N: Tensor) -> Tensor:
    """log p - log q of the same tokens, at least 32 bits wide. Not bounded: count, then bound."""
    return _wide(logprobs_N) - _wide(other_logprobs_N)


def bounded_ratio(log_ratio_N: Tensor, limit: float = MAX_LOG_RATIO) -> Tensor:
    """exp(log-ratio held within +-limit). Infinities end at the bound; NaN stays NaN."""
    return log_ratio_N.clamp(-limit, limit).exp()


def kl_estimate(
    log_ratio_N: Tensor, estimator: KlEstimator, limit: float = MAX_LOG_RATIO
) -> Tensor:
    """KL(p||q) per token from d = log p - log q on tokens drawn from p, fit to be minimised.

    Shape [N] in and out. Gradients with respect to log p:

    - k1: its own gradient, d(log p), has mean zero over p and moves nothing. The value is k1, the
      gradient is that of k2, which is right.
    - k2: d * d(log p), whose mean is the gradient of KL(p||q).
    - k3: (1 - exp(-d)) * d(log p), whose mean is the gradient of KL(q||p): it pulls p to q as
      well, and more strongly where q has mass that p lacks.

    k3 is held at its value at d = -limit below that, with zero gradient. Above it needs no
    bound: a token that q finds all but impossible goes on pulling with gradient 1.
    """
    match estimator:
        case "k1":
            fixed_N = log_ratio_N.detach()
            return fixed_N + fixed_N * (log_ratio_N - fixed_N)
        case "k2":
            return log_ratio_N * log_ratio_N / 2
        case "k3":
            held_N = log_ratio_N.clamp(min=-limit)
            return (-held_N).exp() - 1 + held_N


def token_mean(values_N: Tensor) -> Mean:
    """(sum, weight) of the mean over all trained tokens."""
    values_N = _wide(values_N.detach())
    return values_N.sum(), values_N.new_full((), float(values_N.numel()))


def finite_mean(values_N: Tensor) -> Mean:
    """(sum, weight) of the mean over those trained tokens where the value is finite."""
    values_N = _wide(values_N.detach())
    is_finite_N = values_N.isfinite()
    return values_N.where(is_finite_N, values_N.new_zeros(())).sum(), is_finite_N.to(
        values_N.dtype
    ).sum()


def nonfinite_share(values_N: Tensor) -> Mean:
    """(count of NaN and infinite values, number of trained tokens)."""
    values_N = _wide(values_N.detach())
    return token_mean((~values_N.isfinite()).to(values_N.dtype))


def mismatch_means(inputs: LossInputs) -> dict[str, Mean]:
    """How far the trainer's log-probs are from those that the engine reported for its tokens.

    mismatch_abs: mean of |old - behaviour|. mismatch_kl: k3 of KL(behaviour||old). mismatch_ratio:
    mean of w = exp(old - behaviour). mismatch_far: share of w outside 1/2 to 2.
    effective_sample_share: 1 / mean(w^2).
    """
    gap_N = log_ratio(inputs.behaviour_logprobs_N, inputs.old_logprobs_N).detach()
    ratio_N = bounded_ratio(-gap_N)
    squares, count = finite_mean(ratio_N * ratio_N)
    return {
        "effective_sample_share": (count, squares),
        "mismatch_far": token_mean((gap_N.abs() > math.log(2)).to(gap_N.dtype)),
        "mismatch_ratio": finite_mean(ratio_N),
        "mismatch_abs": finite_mean(gap_N.abs()),
        "mismatch_kl": finite_mean(kl_estimate(gap_N, "k3")),
        "nonfinite_mismatch": nonfinite_share(gap_N),
    }


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.element_size() < 4 else values
