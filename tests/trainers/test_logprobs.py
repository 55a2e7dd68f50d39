"""Log-probs and entropies by chunk, against plain log-softmax and literal numbers."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.trainers.logprobs import chunked_logprobs, token_logprobs


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def _case(num=37, hidden=8, vocab=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn(num, hidden, dtype=torch.float64, generator=generator)
    head = torch.randn(hidden, vocab, dtype=torch.float64, generator=generator)
    targets_N = torch.randint(vocab, (num,), generator=generator)
    temperatures_N = torch.rand(num, dtype=torch.float64, generator=generator) + 0.5
    return hidden_ND.requires_grad_(), head.requires_grad_(), targets_N, temperatures_N


def _naive(logits_NV, targets_N, temperatures_N):
    all_NV = torch.log_softmax(logits_NV / temperatures_N[:, None], -1)
    logprobs_N = all_NV.gather(1, targets_N[:, None])[:, 0]
    return logprobs_N, -(all_NV.exp() * all_NV).sum(-1)


def test_temperature_divides_logits_before_the_softmax():
    """Case 21."""
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    logprobs, entropy = token_logprobs(
        logits, torch.tensor([0, 0]), torch.tensor([0.5, 1.0], dtype=torch.float64)
    )
    assert logprobs.tolist() == pytest.approx([-0.018150, -0.126928], abs=1e-6)
    assert entropy.tolist() == pytest.approx([0.090095, 0.365334], abs=1e-6)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 36, 37, 1000])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_chunks_give_the_values_and_gradients_of_a_plain_log_softmax(
    chunk_tokens, entropy_gradient, fused
):
    hidden_ND, head, targets_N, temperatures_N = _case()
    upstream = torch.linspace(-1, 1, len(targets_N), dtype=torch.float64)

    def loss_of(logprobs_N, entropy_N):
        total = (upstream * logprobs_N).sum()
        return total + (upstream.flip(0) * entropy_N).sum() if entropy_gradient else total

    expected = _naive(hidden_ND @ head, targets_N, temperatures_N)
    wanted = torch.autograd.grad(loss_of(*expected), (hidden_ND, head))
    found = chunked_logprobs(
        lambda h: h @ head,
        hidden_ND,
        targets_N,
        temperatures_N,
        chunk_tokens=chunk_tokens,
        entropy_gradient=entropy_gradient,
        fused=fused,
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert found[1].requires_grad == entropy_gradient
    got = torch.autograd.grad(loss_of(*found), (hidden_ND, head))
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("fused", [False, True])
def test_gradcheck_of_log_prob_and_entropy(fused):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    targets, temperatures = torch.tensor([0, 5, 2, 2]), torch.tensor([1.0, 0.5, 2.0, 1.0])
    assert torch.autograd.gradcheck(
        lambda z: token_logprobs(z, targets, temperatures, entropy_gradient=True, fused=fused),
        (logits,),
    )


@pytest.mark.parametrize("fused", [False, True])
def test_half_precision_logits_are_scored_in_float32_and_get_half_precision_gradients(fused):
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    logits.requires_grad_()
    logprobs, _ = token_logprobs(logits, torch.tensor([1, 2, 3]), torch.ones(3), fused=fused)
    assert logprobs.dtype == torch.float32
    expected = torch.log_softmax(logits.float(), -1)[range(3), [1, 2, 3]]
    torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=1e-6)
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("fused", [False, True])
def test_logits_far_apart_stay_finite(fused):
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(
        logits, torch.tensor([1]), torch.ones(1), entropy_gradient=True, fused=fused
    )
    (logprobs + entropy).sum().backward()
    assert logprobs.item() == -2e4
    assert entropy.item() == 0.0
    assert torch.isfinite(logits.grad).all()


def test_no_tensor_over_all_tokens_and_the_vocabulary_exists_forward_or_backward():
    num, vocab, chunk = 64, 500, 8
    hidden_ND, head, targets_N, temperatures_N = _case(num, 8, vocab)
    with LargestTensor() as largest:
        logprobs_N, _ = chunked_logprobs(
            lambda h: h @ head, hidden_ND, targets_N, temperatures_N, chunk_tokens=chunk
        )
        logprobs_N.sum().backward()
    assert largest.numel == max(chunk * vocab, head.numel())


def test_one_chunk_of_no_gradient_needs_no_graph():
    hidden_ND, head, targets_N, temperatures_N = _case()
    with torch.no_grad():
        logprobs_N, _ = chunked_logprobs(
            lambda h: h @ head, hidden_ND, targets_N, temperatures_N, chunk_tokens=4
        )
    assert not logprobs_N.requires_grad
