"""Log-probs and entropies of trained tokens, a chunk of them at a time.

Logits over the vocabulary exist for one chunk only, in the forward and in the backward: with
several chunks the backward computes a chunk's logits anew (one more matrix product of the head).

Legend: N trained tokens, C tokens of a chunk, J tokens asked about at one position, K most likely
tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from paceline.trainers.fused_logprobs import FusedLogProbs

if TYPE_CHECKING:
    from torch import Tensor

LogitsOf = Callable[["Tensor"], "Tensor"]
"""[C, D] hidden states -> [C, V] logits."""


def token_logprobs(
    logits_CV: Tensor,
    targets_C: Tensor,
    temperatures_C: Tensor,
    *,
    entropy_gradient: bool = False,
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at the targets, and the entropy of that distribution.

    Computed in float32, or float64 if the logits are. Targets are one a position, [C], or several,
    [C, J]; the log-probs have their shape. The entropy, [C], carries gradient only if asked to.
    fused: by compiled kernels, where there is one target a position.
    """
    is_single = targets_C.dim() == 1
    function = FusedLogProbs if fused and is_single else _LogProbs
    logprobs_CJ, entropy_C = function.apply(  # type: ignore[no-untyped-call]
        logits_CV,
        targets_C.unsqueeze(1) if is_single else targets_C,
        temperatures_C,
        entropy_gradient,
    )
    logprobs = logprobs_CJ.squeeze(1) if is_single else logprobs_CJ
    return logprobs, entropy_C if entropy_gradient else entropy_C.detach()


def chunked_logprobs(
    logits_of: LogitsOf,
    hidden_ND: Tensor,
    targets_N: Tensor,
    temperatures_N: Tensor,
    *,
    chunk_tokens: int,
    entropy_gradient: bool = False,
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` of `logits_of(hidden)`, with at most `chunk_tokens` x V logits at a time.

    Differentiable in the hidden states and in whatever `logits_of` uses. Targets [N] or [N, J].
    """

    def scored(
        hidden_CD: Tensor, targets_C: Tensor, temperatures_C: Tensor
    ) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            logits_of(hidden_CD),
            targets_C,
            temperatures_C,
            entropy_gradient=entropy_gradient,
            fused=fused,
        )

    chunks = zip(
        torch.split(hidden_ND, chunk_tokens),
        torch.split(targets_N, chunk_tokens),
        torch.split(temperatures_N, chunk_tokens),
        strict=True,
    )
    if len(targets_N) <= chunk_tokens or not torch.is_grad_enabled():
        parts = [scored(*chunk) for chunk in chunks]
    else:
        parts = [
            checkpoint(scored, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in chunks
        ]
    return torch.cat([lp for lp, _ in parts]), torch.cat([h for _, h in parts])


@torch.no_grad()
def chunked_top_logprobs(
    logits_of: LogitsOf,
    hidden_ND: Tensor,
    targets_N: Tensor,
    temperatures_N: Tensor,
    *,
    k: int,
    vocab: int,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the targets, [N]; the K most likely tokens with an id below `vocab`, [N, K]; and
    their log-probs, [N, K].

    Probabilities are of the whole vocabulary, whatever part of it is looked at.
    """
    logprobs, ids, top_logprobs = [], [], []
    for hidden_CD, targets_C, temperatures_C in zip(
        torch.split(hidden_ND, chunk_tokens),
        torch.split(targets_N, chunk_tokens),
        torch.split(temperatures_N, chunk_tokens),
        strict=True,
    ):
        logits_CV = logits_of(hidden_CD)
        ids_CK = logits_CV[:, :vocab].topk(k, dim=1).indices
        asked_CJ = torch.cat([targets_C.unsqueeze(1), ids_CK], 1)
        logprobs_CJ, _ = token_logprobs(logits_CV, asked_CJ, temperatures_C)
        logprobs.append(logprobs_CJ[:, 0])
        ids.append(ids_CK)
        top_logprobs.append(logprobs_CJ[:, 1:])
    return torch.cat(logprobs), torch.cat(ids), torch.cat(top_logprobs)


class _LogProbs(torch.autograd.Function):
    """With z = logits / temperature, p = softmax(z), log-prob l and entropy H = -sum p log p:

        dl/dz_j = [j = target] - p_j         dH/dz_j = -p_j (log p_j + H)

    Keeps one [C, V] tensor for the backward (p; log p if the entropy has a gradient).
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_CV: Tensor,
        targets_CJ: Tensor,
        temperatures_C: Tensor,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        kind = torch.float64 if logits_CV.dtype == torch.float64 else torch.float32
        with torch.autocast(logits_CV.device.type, enabled=False):
            temperatures_C1 = temperatures_C.to(kind).unsqueeze(1)
            z_CV = logits_CV.to(kind) / temperatures_C1
            z_CV -= z_CV.amax(1, keepdim=True)
            p_CV = z_CV.exp()
            sums_C1 = p_CV.sum(1, keepdim=True)
            log_sums_C = sums_C1.squeeze(1).log()
            logprobs_CJ = z_CV.gather(1, targets_CJ) - log_sums_C.unsqueeze(1)
            p_CV /= sums_C1
            entropy_C = log_sums_C - torch.linalg.vecdot(p_CV, z_CV)
            kept_CV = z_CV.sub_(log_sums_C.unsqueeze(1)) if entropy_gradient else p_CV
        ctx.save_for_backward(kept_CV, targets_CJ, temperatures_C1, entropy_C)
        ctx.has_entropy_gradient = entropy_gradient
        ctx.logits_dtype = logits_CV.dtype
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_C)
        return logprobs_CJ, entropy_C

    @staticmethod
    def backward(ctx: Any, d_logprobs_CJ: Tensor, d_entropy_C: Tensor) -> tuple[Tensor | None, ...]:
        kept_CV, targets_CJ, temperatures_C1, entropy_C = ctx.saved_tensors
        d_logprobs_C1 = d_logprobs_CJ.sum(1, keepdim=True)
        if ctx.has_entropy_gradient:
            p_CV = kept_CV.exp()
            slope_CV = (kept_CV + entropy_C.unsqueeze(1)) * d_entropy_C.unsqueeze(1)
            slope_CV += d_logprobs_C1
            d_z_CV = p_CV.mul_(slope_CV).neg_()
        else:
            d_z_CV = kept_CV * -d_logprobs_C1
        d_z_CV.scatter_add_(1, targets_CJ, d_logprobs_CJ)
        return d_z_CV.div_(temperatures_C1).to(ctx.logits_dtype), None, None, None
