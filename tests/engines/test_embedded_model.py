from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
)

from paceline.engines.embedded_cache import SlotCache, row_index
from paceline.engines.embedded_model import CachedModel, plan_batches
from paceline.engines.embedded_sampler import IntArray
from paceline.errors import EngineError

SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GPT2 = GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64)
SERVED = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2 with sliding layers": Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "gpt2": GPT2,
    "mistral with a sliding window": MistralConfig(**SHAPE, sliding_window=4),
    "gemma3 with both kinds and a soft cap": Gemma3TextConfig(
        **SHAPE,
        head_dim=8,
        sliding_window=4,
        query_pre_attn_scalar=8,
        final_logit_softcapping=2.0,
        layer_types=["sliding_attention", "full_attention"],
    ),
}


def made(config: Any, attention: str = "sdpa") -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.mul_(4)  # so that attention matters
    return model


def rows_of(*lengths: int) -> list[IntArray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 40, n) for n in lengths]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", SERVED)
def test_prefill_decode_and_score_equal_an_uncached_forward(family: str, attention: str) -> None:
    module = made(SERVED[family], attention)
    model = CachedModel(module)
    rows = rows_of(12, 9, 3)
    lengths = np.array([6, 3, 1])
    with model.evaluating():
        wanted = [module(torch.from_numpy(row)[None]).logits[0].log_softmax(-1) for row in rows]
        prefill = model.prefill([row[:n] for row, n in zip(rows, lengths, strict=True)])
        cache = SlotCache(4)
        cache.reserve(12)
        cache.place(
            prefill.blocks, row_index([0, 1, 2], model.device), row_index([0, 1, 2], model.device)
        )
        found = prefill.logits_UV.log_softmax(-1)
        for step in range(7):
            for u, n in enumerate(lengths):
                if n + step <= len(rows[u]):
                    torch.testing.assert_close(found[u], wanted[u][n + step - 1], atol=1e-5, rtol=0)
            position_N = np.minimum(lengths + step, [11, 8, 2])
            token_N = np.array([row[p] for row, p in zip(rows, position_N, strict=True)])
            longest = int(position_N.max()) + 1
            found = model.decode(cache, token_N, position_N, longest).log_softmax(-1)
        for temperature in (1.0, 0.5):
            scores = model.score(rows, [temperature] * 3, max_tokens=20)
            for row, score in zip(rows, scores, strict=True):
                logits = module(torch.from_numpy(row)[None]).logits[0] / temperature
                target = torch.from_numpy(row)[1:, None]
                exact = logits[:-1].log_softmax(-1).gather(-1, target)[:, 0].tolist()
                assert score == pytest.approx([0.0, *exact], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_passes_the_self_check(dtype: torch.dtype) -> None:
    CachedModel(tiny_model(dtype=dtype))


def test_the_output_layer_sees_the_last_positions_only() -> None:
    module = made(SERVED["llama"])
    model = CachedModel(module)
    seen: list[torch.Size] = []
    module.lm_head.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape))
    with model.evaluating():
        prefill = model.prefill(rows_of(9, 5))
    assert seen == [(2, 1, 32)]
    assert prefill.logits_UV.shape == (2, 40)
    assert not module.lm_head._forward_pre_hooks


def test_mode_and_gradients_are_put_back() -> None:
    module = made(GPT2).train()
    module.transformer.drop.eval()
    modes = [m.training for m in module.modules()]
    model = CachedModel(module)

    def fail() -> None:
        with model.evaluating():
            assert not any(m.training for m in module.modules())
            assert not torch.is_grad_enabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [m.training for m in module.modules()] == modes
    assert torch.is_grad_enabled()
    assert all(p.requires_grad for p in module.parameters())


class Forgetful(nn.Module):
    """A model that ignores the cache it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model()
        self.config = self.inner.config
        self.dtype = self.inner.dtype

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.get_output_embeddings()

    def forward(self, input_ids: Any, cache: Any = None, **_: Any) -> Any:
        for layer in range(2 if cache is not None else 0):
            cache.update(
                *[input_ids.new_zeros(len(input_ids), 1, input_ids.shape[1], 1)] * 2, layer
            )
        return self.inner(input_ids=input_ids)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: nn.Linear(2, 2), "not a transformers causal LM"),
        (Forgetful, "log-probs with a key-value cache differ"),
        (
            lambda: made(BloomConfig(vocab_size=40, hidden_size=32, n_layer=2, n_head=4), "eager"),
            "does not work with a plain key-value cache",
        ),
        (
            lambda: made(MambaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2), "eager"),
            "keeps state other than keys and values",
        ),
        (
            lambda: made(
                GPTNeoConfig(
                    vocab_size=40,
                    hidden_size=32,
                    num_layers=2,
                    num_heads=4,
                    attention_types=[[["global", "local"], 1]],
                ),
                "eager",
            ),
            "local attention",
        ),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
            ),
            "encoder-decoder",
        ),
        (lambda: made(SERVED["llama"]).to("meta"), "on one device, and real memory"),
    ],
)
def test_models_that_can_not_be_served_are_refused_at_once(module: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        CachedModel(module())


def test_other_attention_implementations_are_refused() -> None:
    module = made(SERVED["llama"])
    module.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(EngineError, match="'flash_attention_2'"):
        CachedModel(module)


def test_batches_are_of_similar_length_and_within_the_budget() -> None:
    lengths = [3, 90, 4, 100, 2, 3]
    batches = plan_batches(lengths, 200)
    assert batches == [[3, 1], [2, 0, 5, 4]]
    assert plan_batches(lengths, 11) == [[3], [1], [2, 0], [5, 4]]
    assert plan_batches([], 10) == []
