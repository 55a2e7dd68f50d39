"""Log-probs of several tokens at one position, and the most likely ones, a chunk at a time."""

from __future__ import annotations

import pytest
import torch
from trainer_rows import VOCAB

from paceline.trainers.logprobs import chunked_logprobs, chunked_top_logprobs, token_logprobs

NUM, WIDTH = 23, 8


def drawn() -> tuple[torch.Tensor, ...]:
    """Hidden states, a head, tokens at each position (one of them twice), temperatures."""
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(NUM, WIDTH, generator=generator, dtype=torch.float64)
    head_VD = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    targets_NJ = torch.randint(VOCAB, (NUM, 5), generator=generator)
    targets_NJ[:, 3] = targets_NJ[:, 0]
    temperatures_N = torch.tensor([0.7, 1.0, 1.3])[torch.arange(NUM) % 3].double()
    return hidden_ND.requires_grad_(), head_VD.requires_grad_(), targets_NJ, temperatures_N


def plain(hidden_ND, head_VD, targets_NJ, temperatures_N):
    """Through the whole log softmax, and its entropy."""
    logprobs_NV = (hidden_ND @ head_VD.T / temperatures_N[:, None]).log_softmax(-1)
    return logprobs_NV.gather(1, targets_NJ), -(logprobs_NV.exp() * logprobs_NV).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 100])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_values_and_gradients_are_those_of_the_whole_log_softmax(chunk_tokens, entropy_gradient):
    hidden_ND, head_VD, targets_NJ, temperatures_N = drawn()
    slopes_NJ = torch.randn(NUM, 5, generator=torch.Generator().manual_seed(1)).double()

    def gradients(logprobs_NJ, entropy_N):
        total = (logprobs_NJ.exp() * slopes_NJ).sum()
        if entropy_gradient:
            total = total + 0.3 * (entropy_N * slopes_NJ[:, 0]).sum()
        return torch.autograd.grad(total, (hidden_ND, head_VD))

    expected = plain(hidden_ND, head_VD, targets_NJ, temperatures_N)
    found = chunked_logprobs(
        lambda hidden_CD: hidden_CD @ head_VD.T,
        hidden_ND,
        targets_NJ,
        temperatures_N,
        chunk_tokens=chunk_tokens,
        entropy_gradient=entropy_gradient,
    )
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)
    for own, other in zip(gradients(*found), gradients(*expected), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-12)


def test_several_tokens_are_each_what_they_are_alone():
    hidden_ND, head_VD, targets_NJ, temperatures_N = drawn()
    logits_NV = (hidden_ND @ head_VD.T).detach()
    both, entropy_N = token_logprobs(logits_NV, targets_NJ, temperatures_N)
    for j in range(5):
        alone_N, entropy_alone_N = token_logprobs(logits_NV, targets_NJ[:, j], temperatures_N)
        assert torch.equal(both[:, j], alone_N)
        assert torch.equal(entropy_N, entropy_alone_N)


@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_the_most_likely_are_found_a_chunk_at_a_time(chunk_tokens):
    hidden_ND, head_VD, targets_NJ, temperatures_N = drawn()
    sizes = []

    def logits_of(hidden_CD):
        sizes.append(len(hidden_CD))
        return hidden_CD @ head_VD.T

    found = chunked_top_logprobs(
        logits_of,
        hidden_ND,
        targets_NJ[:, 0],
        temperatures_N,
        k=6,
        vocab=VOCAB - 10,
        chunk_tokens=chunk_tokens,
    )
    logprobs_NV = (hidden_ND @ head_VD.T / temperatures_N[:, None]).log_softmax(-1)
    top = logprobs_NV[:, : VOCAB - 10].topk(6)
    expected = (logprobs_NV.gather(1, targets_NJ[:, :1])[:, 0], top.indices, top.values)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)
        assert not own.requires_grad
    assert max(sizes) <= chunk_tokens
    assert sum(sizes) == NUM
