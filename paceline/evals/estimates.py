"""Means over prompts with confidence intervals, and pass@k.

Answers to one prompt are not independent, so a prompt is one value (one cluster) however many
answers it has:

    values all 0 or 1     Wilson's score interval with one trial per prompt
    otherwise             mean +- t * std / sqrt(P), unbiased std, t of P - 1 degrees of freedom

For prompts with equally many answers, the second is the cluster-robust interval.

Legend: P prompts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Z_975 = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts with its 95 % confidence interval.

    Example: Estimate(value=0.5, standard_error=0.25, low=0.15, high=0.85).
    """

    value: float
    standard_error: float | None
    """None where a single prompt says nothing about it."""
    low: float | None
    high: float | None


def estimate(values_P: Sequence[float], *, is_share: bool = False) -> Estimate:
    """Mean of one value per prompt, with its 95 % interval.

    is_share: values lie in [0, 1], and the interval is cut to it.
    Raises ValueError on no values.
    """
    num = len(values_P)
    if num == 0:
        raise ValueError("a mean over no prompts has no value")
    mean = math.fsum(values_P) / num
    error = statistics.stdev(values_P, mean) / math.sqrt(num) if num > 1 else None
    if all(value in (0.0, 1.0) for value in values_P):
        low, high = wilson_interval(sum(value == 1.0 for value in values_P), num)
        return Estimate(mean, error, low, high)
    if error is None:
        return Estimate(mean, None, None, None)
    low, high = mean - t_975(num - 1) * error, mean + t_975(num - 1) * error
    if is_share:
        low, high = max(low, 0.0), min(high, 1.0)
    return Estimate(mean, error, low, high)


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """95 % score interval of a proportion (E. B. Wilson, 1927); sound also at 0 and 1.

    Example: 0 of 10 -> (0.0, 0.2775).
    """
    share = successes / trials
    z2 = Z_975 * Z_975
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z_975 * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials))
    half /= 1 + z2 / trials
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == trials else centre + half
    return low, high


def t_975(degrees: int) -> float:
    """97.5 % quantile of Student's t. Exact for 1 and 2 degrees of freedom; above, the expansion
    of Abramowitz and Stegun, 26.7.5, within 0.2 %."""
    if degrees == 1:
        return math.tan(0.475 * math.pi)
    if degrees == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z, d = Z_975, degrees
    return (
        z
        + (z**3 + z) / (4 * d)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * d**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * d**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * d**4)
    )


def pass_at_k(num_answers: int, num_passed: int, k: int) -> float:
    """Chance that at least one of k answers passes, 1 - C(n - c, k) / C(n, k), without bias
    (M. Chen et al., arXiv 2107.03374, section 2.1).

    Raises ValueError unless 1 <= k <= num_answers: fewer answers than k can not tell.
    """
    if not 1 <= k <= num_answers:
        raise ValueError(f"pass@{k} can not be estimated from {num_answers} answers")
    if not 0 <= num_passed <= num_answers:
        raise ValueError(f"{num_passed} of {num_answers} answers can not have passed")
    return 1 - math.comb(num_answers - num_passed, k) / math.comb(num_answers, k)
