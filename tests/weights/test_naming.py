"""Tensors go out under the names, and in the form, that a saved checkpoint has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_model
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from paceline.weights import naming
from paceline.weights.naming import as_checkpoint, own_tensors

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 8, "moe_intermediate_size": 12}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama, tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "gpt2, tied": GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=32),
    "bloom, tied": BloomConfig(vocab_size=32, hidden_size=16, n_layer=2, n_head=2),
    "mixtral, fused experts": MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "qwen3 moe, fused experts": Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=4),
}


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_sent_is_what_would_be_saved(name: str, tmp_path: Path) -> None:
    model = model_of(CONFIGS[name])
    sent = list(as_checkpoint(model, own_tensors(model)))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert sorted(name for name, _ in sent) == sorted(saved)
    for tensor_name, tensor in sent:
        assert torch.equal(tensor, saved[tensor_name]), tensor_name


def test_a_model_that_was_loaded_sends_what_it_was_loaded_from(tmp_path: Path) -> None:
    model_of(CONFIGS["mixtral, fused experts"]).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert dict(as_checkpoint(loaded, own_tensors(loaded))).keys() == saved.keys()


def test_one_layer_at_a_time_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(CONFIGS["mixtral, fused experts"])
    seen: list[set[str]] = []
    real = naming._revert

    def watched(module: object, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not any(tensor.is_meta for tensor in tensors.values()):
            seen.append({name.split(".")[2] for name in tensors if ".layers." in name})
        return real(module, tensors)

    monkeypatch.setattr(naming, "_revert", watched)
    assert list(as_checkpoint(model, own_tensors(model)))
    assert all(len(layers) <= 1 for layers in seen)
    assert set().union(*seen) == {"0", "1", "2"}


def test_tensors_without_conversions_are_not_touched() -> None:
    model = tiny_model()
    own = dict(own_tensors(model))
    assert all(tensor is own[name] for name, tensor in as_checkpoint(model, own.items()))
    assert own["model.embed_tokens.weight"] is model.lm_head.weight
    assert "lm_head.weight" not in own


def test_saved_buffers_go_along_and_others_do_not() -> None:
    module = torch.nn.BatchNorm1d(3)
    module.register_buffer("mask", torch.ones(3), persistent=False)
    sent = dict(as_checkpoint(module, own_tensors(module)))
    assert sent.keys() == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
