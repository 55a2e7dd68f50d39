"""Small random models of many architectures, for tests that must hold for any causal LM."""

from __future__ import annotations

import torch
import transformers

VOCAB = 64

SMALL = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ARCHITECTURES = {
    "llama": (transformers.LlamaConfig, SIZES),
    "qwen3": (transformers.Qwen3Config, {**SIZES, "head_dim": 8}),
    "mistral, sliding window 4": (transformers.MistralConfig, {**SIZES, "sliding_window": 4}),
    "gemma2, capped logits": (
        transformers.Gemma2Config,
        {
            **SIZES,
            "head_dim": 8,
            "final_logit_softcapping": 5.0,
            "attn_logit_softcapping": None,
            "sliding_window": 4,
        },
    ),
    "cohere, scaled logits": (transformers.CohereConfig, {**SIZES, "logit_scale": 0.25}),
    "granite, divided logits": (transformers.GraniteConfig, {**SIZES, "logits_scaling": 8.0}),
    "gpt2": (transformers.GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gpt-neox": (transformers.GPTNeoXConfig, SIZES),
    "opt": (
        transformers.OPTConfig,
        {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 16},
    ),
    "mixtral": (transformers.MixtralConfig, {**SIZES, "num_local_experts": 4}),
}


def small_model(name: str) -> transformers.PreTrainedModel:
    kind, settings = ARCHITECTURES[name]
    config = kind(**SMALL, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # logits large enough for a cap to matter
    # The grouped matrix product of experts knows no float64.
    return (model if name == "mixtral" else model.double()).eval()
