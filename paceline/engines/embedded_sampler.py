"""Drawing tokens: each from its own (seed, index) and its own row of logits, nothing else.

Randomness is counter-based (splitmix64 of the request's seed and the token's index), and a token
is the inverse of the row's cumulative distribution at that uniform, in vocabulary order. So an
answer does not depend on what else is in the batch, on slots or on the order of calls.

Shape legend: N rows, V vocabulary, K rows with a filter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

UInt64Array = NDArray[np.uint64]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(z: UInt64Array) -> UInt64Array:
    """Finalizer of splitmix64 (Steele et al. 2014, https://doi.org/10.1145/2660193.2660195)."""
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def stream_keys(seeds: Sequence[int]) -> UInt64Array:
    """Where the streams of seeds start: hashed, so that neighbouring seeds share nothing."""
    return _mix(np.array([seed & 0xFFFF_FFFF_FFFF_FFFF for seed in seeds], np.uint64) + _GOLDEN)


def uniforms(keys_N: UInt64Array, index_N: IntArray) -> FloatArray:
    """Uniforms in [0, 1) with 53 bits: number `index` of each stream."""
    z = _mix(keys_N + (index_N.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    uniform: FloatArray = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniform


@dataclass(frozen=True, slots=True)
class Truncation:
    """Rows that keep a part of the vocabulary; parameters are [K, 1]."""

    rows_K: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@dataclass(frozen=True, slots=True)
class Penalty:
    """Rows with a repetition penalty [K, 1]; the caller brings the tokens seen, [K, V]."""

    rows: tuple[int, ...]
    rows_K: Tensor
    penalty: Tensor


@dataclass(frozen=True, slots=True)
class RowSettings:
    """How the rows of a step are drawn. What no row asks for is None and costs nothing."""

    temperature: float | Tensor
    """Of all rows, or [N, 1]; 1 for greedy rows."""
    is_greedy: bool = False
    """All rows take the most likely token."""
    greedy_N: Tensor | None = None
    truncation: Truncation | None = None
    penalty: Penalty | None = None

    @property
    def penalised_rows(self) -> tuple[int, ...]:
        return () if self.penalty is None else self.penalty.rows


def row_settings(sampling_5N: FloatArray, device: torch.device) -> RowSettings:
    """Gather the settings of the active rows; called when the rows change, not each step.

    `sampling_5N`: temperature, top-k, top-p, min-p and repetition penalty of each row.
    """
    temperature_N, top_k_N, top_p_N, min_p_N, penalty_N = sampling_5N

    def column(values: NDArray[Any], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    greedy = temperature_N == 0
    divisor = np.where(greedy, 1.0, temperature_N)
    is_even = bool((divisor == divisor[0]).all())
    cut = np.flatnonzero(~greedy & ((top_k_N > 0) | (top_p_N < 1) | (min_p_N > 0)))
    penalised = np.flatnonzero(penalty_N != 1)
    is_greedy = bool(greedy.all())
    return RowSettings(
        temperature=float(divisor[0]) if is_even else column(divisor),
        is_greedy=is_greedy,
        greedy_N=column(greedy, torch.bool)[:, 0] if greedy.any() and not is_greedy else None,
        truncation=Truncation(
            rows_K=column(cut, torch.long)[:, 0],
            top_k=column(np.where(top_k_N > 0, top_k_N, np.inf)[cut]),
            # A mass of 1 keeps all, also where rounding lets the sum reach 1 early.
            top_p=column(np.where(top_p_N < 1, top_p_N, np.inf)[cut], torch.float64),
            min_p=column(min_p_N[cut]),
        )
        if len(cut)
        else None,
        penalty=Penalty(
            rows=tuple(penalised.tolist()),
            rows_K=column(penalised, torch.long)[:, 0],
            penalty=column(penalty_N[penalised]),
        )
        if len(penalised)
        else None,
    )


def sample(
    logits_NV: Tensor,
    settings: RowSettings,
    uniform_N: Tensor,
    seen: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Draw one token a row; return tokens and their log-probs, [N] each, float64 log-probs.

    Log-probs are of the distribution drawn from. A greedy row has the log-prob that its token
    has at temperature 1, after the repetition penalty. `seen` has a bool [V] for each row of
    `settings.penalty`. Order of the warps: penalty, temperature, top-k, top-p, min-p.
    """
    logits_NV = logits_NV.float()
    if settings.penalty is not None:
        logits_NV = _penalise(logits_NV, settings.penalty, torch.stack(list(seen)))
    if settings.is_greedy:
        largest_N1, token_N1 = logits_NV.max(-1, keepdim=True)
        total_N = (logits_NV - largest_N1).exp_().sum(-1, dtype=torch.float64)
        return token_N1[:, 0], -total_N.log()
    warped_NV = logits_NV
    if isinstance(settings.temperature, Tensor) or settings.temperature != 1.0:
        warped_NV = logits_NV / settings.temperature
    if settings.truncation is not None:
        rows_K = settings.truncation.rows_K
        kept_KV = truncate(warped_NV.index_select(0, rows_K), settings.truncation)
        warped_NV = warped_NV.index_copy(0, rows_K, kept_KV)
    largest_N1 = warped_NV.amax(-1, keepdim=True)
    cdf_NV = (warped_NV - largest_N1).exp_().cumsum(-1, dtype=torch.float64)
    total_N1 = cdf_NV[:, -1:]
    # Below the total, so that the first entry above the target exists and has mass.
    target_N1 = (uniform_N[:, None] * total_N1).minimum(total_N1 * (1 - 2.0**-52))
    token_N1 = torch.searchsorted(cdf_NV, target_N1, right=True)
    token_N1 = token_N1.clamp_(max=warped_NV.shape[-1] - 1)  # a row that is not a number
    if settings.greedy_N is not None:
        greedy_N1 = settings.greedy_N[:, None]
        token_N1 = torch.where(greedy_N1, logits_NV.argmax(-1, keepdim=True), token_N1)
    logprob_N1 = (warped_NV.gather(-1, token_N1) - largest_N1).double() - total_N1.log()
    return token_N1[:, 0], logprob_N1[:, 0]


def truncate(logits_KV: Tensor, truncation: Truncation) -> Tensor:
    """Set what top-k, then top-p, then min-p drop to -inf. The most likely token always stays."""
    sorted_KV, order_KV = logits_KV.sort(stable=True, dim=-1, descending=True)
    rank_V = torch.arange(logits_KV.shape[-1], device=logits_KV.device)
    keep_KV = rank_V < truncation.top_k
    prob_KV = sorted_KV.masked_fill(~keep_KV, -torch.inf).softmax(-1)
    before_KV = prob_KV.cumsum(-1, dtype=torch.float64) - prob_KV
    keep_KV &= before_KV < truncation.top_p
    keep_KV &= prob_KV >= truncation.min_p * prob_KV[:, :1]
    dropped_KV = torch.empty_like(keep_KV).scatter_(-1, order_KV, ~keep_KV)
    return logits_KV.masked_fill(dropped_KV, -torch.inf)


def _penalise(logits_NV: Tensor, penalty: Penalty, seen_KV: Tensor) -> Tensor:
    """Repetition penalty (Keskar et al. 2019, https://arxiv.org/abs/1909.05858, section 4.1)."""
    picked_KV = logits_NV.index_select(0, penalty.rows_K)
    punished_KV = torch.where(
        picked_KV > 0, picked_KV / penalty.penalty, picked_KV * penalty.penalty
    )
    return logits_NV.index_copy(0, penalty.rows_K, torch.where(seen_KV, punished_KV, picked_KV))
