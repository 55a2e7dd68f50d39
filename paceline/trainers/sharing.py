"""Whether a model can compute shared prefixes once, and the attention that lets it.

The attention functions of transformers get whatever a model's forward is called with. So sdpa's is
wrapped, once in the process: with a `prefix_tree` it attends to whole rows, without one nothing
changes. A model fits if all its layers attend fully through that function and nothing else in them
looks at another token. What a configuration says is asked first, then a small tree is compared with
its rows alone.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.trainers.layout import make_micro_batch
from paceline.trainers.prefix_tree import grow
from paceline.types import Row

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.trainers.layout import MicroBatch

WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention_window_size", "window_size")
"""Fields of a configuration that keep attention from seeing a whole row."""


def tree_inputs(batch: MicroBatch) -> dict[str, Any]:
    """What a model is called with besides tokens and positions if rows share their prefixes."""
    if batch.tree is None:
        return {}
    # A mask of four dimensions is taken as it is, so none is built for all nodes. Nobody reads it.
    mask = batch.input_ids.new_zeros((1, 1, 1, 1), dtype=torch.bool)
    return {"attention_mask": mask, "prefix_tree": batch.tree}


@torch.no_grad()
def why_not_shared(body: Any) -> str | None:
    """The reason why the body of a model must see each row whole; None if it can share prefixes."""
    if reason := _refused_by_config(body.config):
        return reason
    _install()
    batch, rows = _probe(body)
    try:
        named = {"position_ids": batch.position_ids, **tree_inputs(batch)}
        found = body(input_ids=batch.input_ids, use_cache=False, **named).last_hidden_state
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        return f"its forward can not work on a tree of prefixes ({type(error).__name__}: {error})"
    num_layers = body.config.get_text_config().num_hidden_layers
    if batch.tree is None or batch.tree.num_uses != num_layers:
        return "not every layer attends through transformers' function for sdpa"
    picked = found[0].index_select(0, batch.predicting_N)
    alone = [body(input_ids=row[None], use_cache=False).last_hidden_state[0] for row in rows]
    if not is_close(picked, torch.cat(alone)):
        return "its outputs differ from those of the rows alone"
    return None


def _refused_by_config(config: Any) -> str | None:
    text = config.get_text_config()
    attention = getattr(config, "_attn_implementation", None)
    if attention != "sdpa":
        return f"its attention is {attention!r}; `sdpa` is needed"
    if kinds := set(getattr(text, "layer_types", None) or ()) - {"full_attention"}:
        return f"it has layers of {', '.join(sorted(kinds))}"
    longest = getattr(text, "max_position_embeddings", None) or math.inf
    if windows := [name for name in WINDOWS if (getattr(text, name, None) or longest) < longest]:
        return f"its attention is limited by {windows[0]}"
    if "local" in (getattr(text, "attention_layers", None) or ()):
        return "it has local attention"
    return None


def _install() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if getattr(plain, "func", None) is not _attention:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = partial(_attention, plain)


def _attention(
    plain: Any,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *values: Any,
    prefix_tree: Any = None,
    **named: Any,
) -> Any:
    """An attention function of transformers: rows of a tree where there is one, else as before."""
    if prefix_tree is None:
        return plain(module, query, key, value, attention_mask, *values, **named)
    return prefix_tree.attend(plain, module, (query, key, value), named), None


def _probe(body: Any) -> tuple[MicroBatch, list[Tensor]]:
    """A tree of four rows, each of whose tokens is asked for, and the rows."""
    vocab = body.get_input_embeddings().num_embeddings
    device = next(body.parameters()).device
    drawn = np.random.default_rng(0).integers(0, vocab, 12)
    starts = (drawn[:9], drawn[[0, 1, 2, 3, 9, 10]], drawn[[0, 1, 2, 3, 9]], drawn[[11, 4]])
    rows = []
    for tokens_T in starts:
        # One more token than the model reads: the last one is only predicted.
        zeros_T = np.zeros(len(tokens_T) + 1)
        mask_T = np.arange(len(zeros_T)) > 0
        rows.append(Row(np.append(tokens_T, 0), mask_T, zeros_T, zeros_T, zeros_T))
    lengths = [len(tokens_T) for tokens_T in starts]
    batch = make_micro_batch(rows, range(4), lengths, "padded", device, grow(starts))
    return batch, [torch.from_numpy(tokens_T).to(device) for tokens_T in starts]


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Equal but for rounding: 1e-4 of the largest number, 2e-2 in half precision."""
    if found.shape != expected.shape:
        return False
    tolerance = 2e-2 if expected.dtype in (torch.bfloat16, torch.float16) else 1e-4
    scale = float(expected.double().abs().max()) + 1e-6
    return float((found.double() - expected.double()).abs().max()) <= tolerance * scale
