"""Attention of a decode step that reads each key and value once, however many heads share it.

With grouped-query attention (arXiv 2305.13245) transformers repeats keys and values for every head
that reads them, where a mask is given: copies several times the size of the cache at every step.
For one query position the heads of a group can stand in the place of positions instead. Newer
versions of transformers do the same, and are left to it.

Legend: N rows, H heads, K key-value heads, S positions, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations import sdpa_attention

NAME = "paceline_decode"
IS_BUILT_IN = hasattr(sdpa_attention, "pack_gqa")


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [N, H, 1, D], key and value [N, K, S, D], mask [N, 1, 1, S].

    Returns [N, 1, H, D].
    """
    rows, heads, length, dim = query.shape
    groups = key.shape[1]
    has_more = any(options.get(name) is not None for name in ("softcap", "s_aux", "position_bias"))
    if length != 1 or groups == heads or has_more:
        output, _ = sdpa_attention.sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return output, None
    packed = query.reshape(rows, groups, heads // groups, dim)
    found = torch.nn.functional.scaled_dot_product_attention(
        packed, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return found.reshape(rows, 1, heads, value.shape[-1]), None


@contextmanager
def grouped(config: Any) -> Iterator[None]:
    """Let the attention layers of a model use it for as long as the block runs."""
    if IS_BUILT_IN or config._attn_implementation != "sdpa":
        yield
        return
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


AttentionInterface.register(NAME, grouped_attention)
