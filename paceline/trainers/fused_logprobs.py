"""Log-probs of one token a position in two passes over the logits, by kernels that are compiled.

The eager way of `logprobs` goes over [C, V] about ten times, and keeps a float32 copy for the
backward. Here one kernel reads the logits, and one writes their gradient; nothing but the logits
themselves is kept. On a GPU `torch.compile` makes the kernels; elsewhere the same functions run as
they stand, which is slower than the eager way and is there to be tested.

Legend: C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


class FusedLogProbs(torch.autograd.Function):
    """With z = logits / temperature, p = softmax(z), log-prob l and entropy H = -sum p log p:

    dl/dz_j = [j = target] - p_j         dH/dz_j = -p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_CV: Tensor,
        targets_C1: Tensor,
        temperatures_C: Tensor,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs [C, 1] and entropies [C], in float32, or float64 if the logits are."""
        is_double = logits_CV.dtype == torch.float64
        temperatures_C1 = temperatures_C.to(torch.float64 if is_double else torch.float32)[:, None]
        with torch.autocast(logits_CV.device.type, enabled=False):
            logprobs_C1, entropy_C1, total_C1 = _function(_read, logits_CV)(
                logits_CV, targets_C1, temperatures_C1
            )
        ctx.save_for_backward(logits_CV, targets_C1, temperatures_C1, entropy_C1, total_C1)
        ctx.has_entropy_gradient = entropy_gradient
        entropy_C = entropy_C1.squeeze(1)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_C)
        return logprobs_C1, entropy_C

    @staticmethod
    def backward(ctx: Any, d_logprobs_C1: Tensor, d_entropy_C: Tensor) -> tuple[Tensor | None, ...]:
        logits_CV, targets_C1, temperatures_C1, entropy_C1, total_C1 = ctx.saved_tensors
        if ctx.has_entropy_gradient:
            d_entropy_C1 = d_entropy_C[:, None]
        else:
            d_entropy_C1 = torch.zeros_like(entropy_C1)
        d_logits_CV = _function(_write, logits_CV)(
            logits_CV, targets_C1, temperatures_C1, entropy_C1, total_C1,
            d_logprobs_C1, d_entropy_C1,
        )  # fmt: skip
        return d_logits_CV, None, None, None


def _read(
    logits_CV: Tensor, targets_C1: Tensor, temperatures_C1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and log sum exp of the logits over the temperature; all [C, 1]."""
    z_CV = logits_CV.to(temperatures_C1.dtype) / temperatures_C1
    largest_C1 = z_CV.amax(1, keepdim=True)
    shifted_CV = z_CV - largest_C1
    exp_CV = shifted_CV.exp()
    sum_C1 = exp_CV.sum(1, keepdim=True)
    log_sum_C1 = sum_C1.log()
    logprobs_C1 = shifted_CV.gather(1, targets_C1) - log_sum_C1
    # Where exp is 0 the logit may be -inf: 0 x -inf is no number.
    product_CV = torch.where(exp_CV > 0, shifted_CV * exp_CV, 0.0)
    entropy_C1 = log_sum_C1 - product_CV.sum(1, keepdim=True) / sum_C1
    return logprobs_C1, entropy_C1, largest_C1 + log_sum_C1


def _write(
    logits_CV: Tensor,
    targets_C1: Tensor,
    temperatures_C1: Tensor,
    entropy_C1: Tensor,
    total_C1: Tensor,
    d_logprobs_C1: Tensor,
    d_entropy_C1: Tensor,
) -> Tensor:
    """Gradient of the logits, in their type."""
    logp_CV = logits_CV.to(temperatures_C1.dtype) / temperatures_C1 - total_C1
    p_CV = logp_CV.exp()
    column_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    hit_CV = torch.where(column_V[None, :] == targets_C1, d_logprobs_C1, 0.0)
    slope_CV = d_logprobs_C1 + torch.where(p_CV > 0, logp_CV + entropy_C1, 0.0) * d_entropy_C1
    return ((hit_CV - p_CV * slope_CV) / temperatures_C1).to(logits_CV.dtype)


def _function(function: Callable[..., Any], logits_CV: Tensor) -> Callable[..., Any]:
    return _compiled(function) if logits_CV.device.type == "cuda" else function


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled
