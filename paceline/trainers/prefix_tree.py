"""Rows that begin alike are computed once: the tree of a micro-batch's prefixes.

Each node is a token after the tokens of its ancestors. What a causal model makes of a token
depends on those alone, so rows share the nodes of what they have in common: the prompt of a group,
the turns that its samples have not yet parted in, answers that are equal. Embeddings, projections
and feed-forward layers see each node once. Attention sees whole rows again, one for each leaf,
made of the nodes' queries, keys and values; of a node's copies one output is kept. Gradients of
the copies are summed by the backward of the gather.

Rows of attention are padded on the right, in blocks of similar length.

Legend: M nodes, R rows of a block, L positions of its longest, H heads, E head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.types import IntArray

MAX_FILL_SHARE = 0.125
"""Filled-up positions of a block, as a share of all its positions ..."""
MIN_FILL = 256
"""... but this many are always allowed: they cost less than one more call of attention."""


@dataclass(slots=True)
class Block:
    """Rows of attention of similar length."""

    num_rows: int
    nodes_RL: Tensor
    """int64, flat: the node at each position; node 0 where filled up."""


@dataclass(slots=True)
class PrefixTree:
    """How the nodes of a micro-batch become rows of attention and nodes again."""

    blocks: list[Block]
    outputs_M: Tensor
    """int64: for each node, its position among all positions of all blocks."""
    num_uses: int = field(default=0)
    """Calls of attention so far."""

    def attend(
        self, attention: Any, module: Any, states: Sequence[Tensor], named: dict[str, Any]
    ) -> Tensor:
        """Causal attention of whole rows; states: query, key and value, each [1, H, M, E].

        Returns [1, M, H, E], like an attention function of transformers.
        """
        self.num_uses += 1
        flat = [x.transpose(1, 2).flatten(0, 1) for x in states]
        parts = []
        for block in self.blocks:
            rows = [_spread(x, block) for x in flat]
            parts.append(attention(module, *rows, None, **named)[0].flatten(0, 1))
        return torch.cat(parts).index_select(0, self.outputs_M)[None]


def _spread(states_MHE: Tensor, block: Block) -> Tensor:
    """[R, H, L, E] of nodes [M, H, E]."""
    chosen = states_MHE.flatten(1).index_select(0, block.nodes_RL)
    return chosen.view(block.num_rows, -1, *states_MHE.shape[1:]).transpose(1, 2)


@dataclass(slots=True)
class Nodes:
    """The tree before it is made of tensors."""

    tokens_M: IntArray
    positions_M: IntArray
    """Depth of each node: 0 for the first token of a row."""
    paths_BT: IntArray
    """Nodes of each row, in the order of the rows; beyond the row's end anything."""
    leaves: IntArray
    """Indices of the rows that are not the beginning of another one."""
    lengths: IntArray
    """Of the rows."""
    carriers_M: IntArray
    """For each node, which of the leaves' rows holds it."""


def grow(inputs: Sequence[IntArray]) -> Nodes:
    """The tree of these rows, none of them empty.

    In lexicographic order each row shares most with the one before it, so a node is new where a
    row has left the one before; and a row is no leaf if the one after it goes on where it ends.
    """
    order = sorted(range(len(inputs)), key=lambda i: inputs[i].astype(">i8").tobytes())
    lengths = np.array([len(inputs[i]) for i in order])
    tokens_BT = np.full((len(inputs), lengths.max()), -1)
    for b, i in enumerate(order):
        tokens_BT[b, : lengths[b]] = inputs[i]
    is_equal_BT = np.logical_and.accumulate(tokens_BT[1:] == tokens_BT[:-1], axis=1)
    shared = np.minimum(is_equal_BT.sum(1), lengths[:-1])
    column_T = np.arange(tokens_BT.shape[1])
    is_new_BT = column_T < lengths[:, None]
    is_new_BT[1:] &= column_T >= shared[:, None]
    ids_BT = np.where(is_new_BT, np.cumsum(is_new_BT).reshape(is_new_BT.shape) - 1, -1)
    is_leaf = np.append(shared < lengths[:-1], True)
    row_M, position_M = np.nonzero(is_new_BT)
    paths_BT = np.empty_like(ids_BT)
    paths_BT[order] = np.maximum.accumulate(ids_BT, axis=0)
    by_row = np.empty_like(lengths)
    by_row[order] = lengths
    return Nodes(
        tokens_M=tokens_BT[is_new_BT],
        positions_M=position_M,
        paths_BT=paths_BT,
        leaves=np.array(order)[is_leaf],
        lengths=by_row,
        carriers_M=(np.cumsum(is_leaf) - is_leaf)[row_M],
    )


def make_tree(nodes: Nodes, device: torch.device) -> PrefixTree:
    """Rows of attention in blocks of similar length, and the way back."""
    blocks: list[Block] = []
    lengths = nodes.lengths[nodes.leaves]
    starts = np.zeros(len(lengths), np.int64)
    base = 0
    for block in _similar(lengths.tolist()):
        width = int(lengths[block].max())
        nodes_RL = nodes.paths_BT[nodes.leaves[block], :width]
        nodes_RL[np.arange(width) >= lengths[block][:, None]] = 0
        starts[block] = base + np.arange(len(block)) * width
        base += nodes_RL.size
        blocks.append(Block(len(block), _integers(nodes_RL.reshape(-1), device)))
    return PrefixTree(blocks, _integers(starts[nodes.carriers_M] + nodes.positions_M, device))


def _similar(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of rows that are padded together, longest first."""
    block: list[int] = []
    width = used = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        positions = width * (len(block) + 1)
        fill = positions - used - lengths[i]
        if block and fill > max(MIN_FILL, MAX_FILL_SHARE * positions):
            yield block
            block = []
        if not block:
            width = used = 0
        width = width or lengths[i]
        block.append(i)
        used += lengths[i]
    yield block


def _integers(values: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device, non_blocking=True)
