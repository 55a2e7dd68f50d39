"""A tiny random model and a character tokenizer for tests."""

from __future__ import annotations

import string

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = string.digits + string.ascii_lowercase + "+-*=?!. \n"


def tiny_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """One token per character; ids: <pad> 0, <eos> 1, <unk> 2, then the characters."""
    vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    vocab |= {c: i + len(vocab) for i, c in enumerate(CHARACTERS)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer


def tiny_model(
    seed: int = 0,
    vocab: int = 64,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    max_positions: int = 128,
) -> LlamaForCausalLM:
    """A Llama of about 20 thousand parameters with weights drawn from the seed."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model.to(dtype).eval()
