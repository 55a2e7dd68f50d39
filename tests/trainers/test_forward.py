"""Log-probs of any transformers model equal those of its own whole logits, in both layouts."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, small_model
from tiny import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_rows import VOCAB, model64, random_rows

from paceline.trainers.forward import CausalForward
from paceline.trainers.layout import input_lengths, make_micro_batch

IN_FLOAT32 = {"mixtral": 2e-5, "gemma2, capped logits": 1e-6}
"""Models that compute parts in float32 whatever they are given, and how far that may show."""


def _expected(model, rows):
    """Row by row, from whole logits."""
    logprobs, entropies = [], []
    for row in rows:
        ids = torch.tensor(row.tokens_T)[None]
        logits_TV = model(input_ids=ids, use_cache=False).logits[0, :-1].double() / row.temperature
        all_TV = torch.log_softmax(logits_TV, -1)
        trained_T = torch.tensor(row.mask_T[1:])
        logprobs.append(all_TV.gather(1, ids[0, 1:, None])[:, 0][trained_T])
        entropies.append(-(all_TV.exp() * all_TV).sum(-1)[trained_T])
    return torch.cat(logprobs), torch.cat(entropies)


def _found(forward, rows):
    lengths = input_lengths(rows)
    batch = make_micro_batch(rows, range(len(rows)), lengths, forward.layout, torch.device("cpu"))
    return forward(batch)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_log_probs_equal_those_of_whole_logits(name, layout):
    model, rows = small_model(name), random_rows(num=5)
    forward = CausalForward(model, layout=layout, chunk_tokens=7)
    assert forward.slow_reason is None
    found, expected = _found(forward, rows), _expected(model, rows)
    gaps = [(a.double() - b).abs().max() for a, b in zip(found, expected, strict=True)]
    assert max(gaps) < IN_FLOAT32.get(name, 1e-10)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@torch.no_grad()
def test_sdpa_layouts_agree_with_whole_logits(layout):
    model, rows = model64(), random_rows(num=9)
    torch.testing.assert_close(
        _found(CausalForward(model, layout=layout, chunk_tokens=7), rows),
        _expected(model, rows),
        rtol=0,
        atol=1e-10,
    )


class CappedInSecret(transformers.LlamaForCausalLM):
    """Does to its logits what no field of its configuration tells."""

    def forward(self, *values, **named):
        output = super().forward(*values, **named)
        output.logits = 4 * torch.tanh(output.logits / 4)
        return output


@torch.no_grad()
def test_unknown_change_of_logits_takes_the_slow_way_with_its_reason(caplog):
    model = CappedInSecret(tiny_model(vocab=VOCAB).config).double().eval()
    with caplog.at_level(logging.WARNING):
        forward = CausalForward(model)
    assert forward.slow_reason is not None
    assert "whole logits" in caplog.text
    rows = random_rows(num=4)
    torch.testing.assert_close(_found(forward, rows), _expected(model, rows), rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_cap_that_the_configuration_names_but_the_model_does_not_apply_is_ignored():
    model = model64()
    model.config.final_logit_softcapping = 30.0
    rows = random_rows(num=4)
    torch.testing.assert_close(
        _found(CausalForward(model), rows), _expected(model, rows), rtol=0, atol=1e-10
    )


class BlindToPositions(transformers.LlamaForCausalLM):
    def forward(self, *values, position_ids=None, **named):
        return super().forward(*values, **named)


def test_a_model_that_mixes_packed_rows_is_padded(caplog):
    model = BlindToPositions(tiny_model(vocab=VOCAB).config).eval()
    with caplog.at_level(logging.WARNING):
        assert CausalForward(model, layout="packed").layout == "padded"
    assert "rows are padded instead" in caplog.text


def test_layout_auto_is_padded_for_sdpa():
    assert CausalForward(model64()).layout == "padded"


class _Shapes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.with_vocabulary: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == 509:
                self.with_vocabulary.add(tensor.numel() // 509)
        return result


def test_logits_exist_for_one_chunk_of_trained_tokens_at_a_time():
    model = tiny_model(vocab=509)
    rows = random_rows(num=12)
    forward = CausalForward(model, chunk_tokens=16)
    batch = make_micro_batch(
        rows, range(len(rows)), input_lengths(rows), "padded", torch.device("cpu")
    )
    with _Shapes() as seen:
        logprobs_N, _ = forward(batch)
        logprobs_N.sum().backward()
    assert len(logprobs_N) > 64
    # Rows of tensors that end in the vocabulary: chunks, and the head transposed (32 wide).
    assert max(seen.with_vocabulary) == 32
    assert 16 in seen.with_vocabulary
