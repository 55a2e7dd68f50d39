"""From rows to micro-batches: which rows go together, and the tensors that a forward eats.

Two layouts hold the same rows:

- `padded`: [B, T], filled up on the right. Causal attention never looks right, so no mask is
  needed and the fastest kernels apply. Rows are sorted by length, so little is filled up.
- `packed`: [1, N], rows one after the other, positions restarting at 0; attention is
  block-diagonal. Best with variable-length flash kernels, which take the positions as they are;
  `sdpa` and `eager` build an N x N mask and compute all of it. Measured on a CPU core, 1 M
  parameters: 384 rows of 11-16 tokens 1.2 to 1.7 times, 12 rows of 200-600 tokens 2 to 5 times
  the time of `padded`.

Hence the rule of `auto`: packed with flash attention, else padded.

Where rows begin alike and the model allows it, `padded` gives way to a tree of prefixes
(`paceline.trainers.prefix_tree`): [1, M nodes], attention still in padded rows.

A row's columns have length T; an input is cut before its last trained token, which nothing
follows. Legend: B rows, T positions, N trained tokens of a micro-batch in row order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

from paceline.errors import TrainerError
from paceline.trainers.prefix_tree import Nodes, PrefixTree, grow, make_tree
from paceline.types import Row

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.types import FloatArray

Layout = Literal["padded", "packed"]
MAX_FILL_SHARE = 0.125
"""Filled-up positions of a padded micro-batch, as a share of all its positions ..."""
MIN_FILL = 256
"""... but this many are always allowed: they cost less than one more call of the model."""
MAX_NODE_SHARE = 0.85
"""Nodes of the trees of a batch, as a share of its rows' tokens: with more of them, rows are padded
as they are, since a tree costs time too."""


def choose_layout(attention: str) -> Layout:
    """The rule of `auto`, from the attention implementation of transformers."""
    return "packed" if "flash" in attention else "padded"


def input_lengths(rows: Sequence[Row]) -> list[int]:
    """Tokens of each row that the model must read: those before its last trained one; 0 if none.

    Raises TrainerError for a row whose first token is trained: nothing predicts it.
    """
    lengths: list[int] = []
    for index, row in enumerate(rows):
        trained = np.flatnonzero(row.mask_T)
        if len(trained) and trained[0] == 0:
            raise TrainerError(
                f"row {index} (prompt {row.episode[0]!r}): its first token is trained, but has no "
                "token before it to be predicted from"
            )
        lengths.append(int(trained[-1]) if len(trained) else 0)
    return lengths


def plan_micro_batches(lengths: Sequence[int], max_tokens: int, layout: Layout) -> list[list[int]]:
    """Indices of rows that go together; longest first, each list in ascending order.

    Rows of length 0 are left out. A row above the budget gets a micro-batch of its own. The
    budget counts positions, filled-up ones included. The same lengths give the same plan.
    """
    by_length = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: (-lengths[i], i))
    plan: list[list[int]] = []
    width = used = 0
    for i in by_length:
        with_it = used + lengths[i]
        positions = width * (len(plan[-1]) + 1) if plan and layout == "padded" else with_it
        may_fill = max(MIN_FILL, MAX_FILL_SHARE * positions)
        if plan and positions <= max_tokens and positions - with_it <= may_fill:
            plan[-1].append(i)
            used = with_it
        else:
            plan.append([i])
            width = used = lengths[i]
    return [sorted(rows) for rows in plan]


def plan_trees(
    rows: Sequence[Row], lengths: Sequence[int], max_tokens: int
) -> list[tuple[list[int], Nodes]] | None:
    """Indices of rows that go together and the tree of their prefixes; None if it does not pay.

    Rows of one prompt stay together as far as the budget allows, which counts every row's tokens
    as if nothing was shared. Prompts with the longest rows first, and their rows in order. The same
    rows give the same plan.
    """
    prompts: dict[str, list[int]] = {}
    for i, length in enumerate(lengths):
        if length:
            prompts.setdefault(rows[i].episode[0], []).append(i)
    plan: list[list[int]] = []
    used = 0
    for indices in sorted(prompts.values(), key=lambda p: (-max(lengths[i] for i in p), p[0])):
        total = sum(lengths[i] for i in indices)
        starts_anew = used + total > max_tokens
        for i in indices:
            if not plan or starts_anew or used + lengths[i] > max_tokens:
                plan.append([])
                used, starts_anew = 0, False
            plan[-1].append(i)
            used += lengths[i]
    trees = [(p, grow([rows[i].tokens_T[: lengths[i]] for i in p])) for p in plan]
    num_nodes = sum(len(nodes.tokens_M) for _, nodes in trees)
    return trees if num_nodes <= MAX_NODE_SHARE * sum(lengths) else None


@dataclass(slots=True)
class MicroBatch:
    """Inputs of one forward, and where its trained tokens are."""

    rows: list[int]
    """Indices into the rows that it was made from, in the order of the layout."""
    input_ids: Tensor
    """int64 [B, T], or [1, N of the inputs], or [1, M nodes]."""
    position_ids: Tensor | None
    """int64, shaped like the inputs; None for 0..T-1 in each row."""
    predicting_N: Tensor
    """int64: flat index of the position whose hidden state predicts the token."""
    targets_N: Tensor
    """int64: the trained tokens."""
    temperatures_N: Tensor
    rows_N: Tensor
    """int64: row of each token, 0..len(rows)-1."""
    tree: PrefixTree | None = None
    """How attention sees the nodes, if rows share their prefixes."""


class Arrangement(Protocol):
    """What a model made ready says about the micro-batches that it takes."""

    layout: Layout
    shares_prefixes: bool

    @property
    def max_positions(self) -> int | None: ...


Plan = Sequence[tuple[list[int], Nodes | None]]
"""Of each micro-batch the indices of its rows, and the tree of their inputs if they share one."""


def plan_rows(rows: Sequence[Row], forward: Arrangement, max_tokens: int) -> Plan:
    """Which rows go together, as the model can take them; rows without trained tokens nowhere."""
    budget = min(max_tokens, forward.max_positions or max_tokens)
    lengths = input_lengths(rows)
    trees = plan_trees(rows, lengths, budget) if forward.shares_prefixes else None
    return trees or [(p, None) for p in plan_micro_batches(lengths, budget, forward.layout)]


def micro_batches(
    rows: Sequence[Row], forward: Arrangement, max_tokens: int, device: torch.device
) -> Iterator[MicroBatch]:
    """The rows with trained tokens, one micro-batch after the other, as the model can take them."""
    plan = plan_rows(rows, forward, max_tokens)
    yield from make_micro_batches(rows, plan, forward.layout, device)


def make_micro_batches(
    rows: Sequence[Row], plan: Plan, layout: Layout, device: torch.device
) -> Iterator[MicroBatch]:
    """The micro-batches of a plan, each made when it is asked for."""
    lengths = input_lengths(rows)
    for indices, nodes in plan:
        yield make_micro_batch(rows, indices, lengths, layout, device, nodes)


def filler(layout: Layout, device: torch.device) -> MicroBatch:
    """The smallest micro-batch, of no row; one arbitrary token is asked for."""
    zeros_T = np.zeros(2)
    row = Row(np.zeros(2, np.int64), np.array([False, True]), zeros_T, zeros_T, zeros_T)
    micro = make_micro_batch([row], [0], [1], layout, device)
    micro.rows = []
    return micro


def make_micro_batch(
    rows: Sequence[Row],
    indices: Sequence[int],
    lengths: Sequence[int],
    layout: Layout,
    device: torch.device,
    nodes: Nodes | None = None,
) -> MicroBatch:
    """The tensors of the rows with these indices, on the device.

    nodes: the tree of their inputs, in their order; it takes the place of the layout.
    """
    chosen = [rows[i] for i in indices]
    sizes = np.array([lengths[i] for i in indices])
    trained = [np.flatnonzero(row.mask_T) for row in chosen]
    counts = [len(t) for t in trained]
    starts = np.zeros(len(chosen), np.int64)
    if nodes is not None:
        ids, positions = nodes.tokens_M[None], nodes.positions_M[None]
    elif layout == "padded":
        width = int(sizes.max())
        ids = np.zeros((len(chosen), width), dtype=np.int64)
        for b, row in enumerate(chosen):
            ids[b, : sizes[b]] = row.tokens_T[: sizes[b]]
        starts, positions = np.arange(len(chosen)) * width, None
    else:
        ids = np.concatenate([r.tokens_T[:n] for r, n in zip(chosen, sizes, strict=True)])[None]
        positions = np.concatenate([np.arange(n) for n in sizes])[None]
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    if nodes is None:
        before = [t - 1 + s for t, s in zip(trained, starts, strict=True)]
    else:
        before = [path[t - 1] for path, t in zip(nodes.paths_BT, trained, strict=True)]
    predicting = np.concatenate(before)
    targets = np.concatenate([r.tokens_T[t] for r, t in zip(chosen, trained, strict=True)])

    def integers(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device, non_blocking=True)

    return MicroBatch(
        rows=list(indices),
        input_ids=integers(ids),
        position_ids=None if positions is None else integers(positions),
        predicting_N=integers(predicting),
        targets_N=integers(targets),
        temperatures_N=column(
            [np.full(c, r.temperature) for r, c in zip(chosen, counts, strict=True)], device
        ),
        rows_N=integers(np.repeat(np.arange(len(chosen)), counts)),
        tree=None if nodes is None else make_tree(nodes, device),
    )


def trained_column(
    rows: Sequence[Row], values_T: Sequence[FloatArray], device: torch.device
) -> Tensor:
    """One float64 column [N] of what belongs to the trained tokens of the rows."""
    return column([v[r.mask_T] for r, v in zip(rows, values_T, strict=True)], device)


def column(parts: Sequence[FloatArray], device: torch.device) -> Tensor:
    """The parts behind one another, float64."""
    return torch.from_numpy(np.concatenate(parts).astype(np.float64)).to(device, non_blocking=True)
