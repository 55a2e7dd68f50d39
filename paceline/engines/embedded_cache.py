"""Keys and values of running sequences, in the shape that transformers' attention layers expect.

Two caches, one for each kind of forward. A prefill keeps what the model makes; a decode step
writes one position a row into preallocated slots and reads a slice of them. Slots hold a sequence
from position 0 on, so that everything beyond its length is masked and never read.

Shape legend: N active rows, R rows computed, B slots, S positions held, L padded prompt length,
U prompts of a prefill, K rows placed at one time, H key-value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

Blocks = dict[int, tuple[Tensor, Tensor]]
"""Layer index -> keys, values; each [rows, positions, H, D]."""

BLOCK_TOKENS = 64
"""Slots grow in multiples of this many positions."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Rows of a decode step that are equal so far, so that one of them is computed for all."""

    first_R: Tensor
    """The row that is computed for each set of equal ones."""
    of_N: Tensor
    """Which of them each row is a copy of."""


class PrefillCache(Cache):  # type: ignore[misc]
    """Keeps the keys and values [U, L, H, D] of one prefill as the model makes them."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.blocks: Blocks = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.blocks[layer_idx] = (key_states.transpose(1, 2), value_states.transpose(1, 2))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class SlotCache(Cache):  # type: ignore[misc]
    """One slot a sequence; rows 0..N-1 are read as a view `[:N, :longest]` without a copy."""

    def __init__(self, num_slots: int, max_positions: int | None = None) -> None:
        super().__init__(layers=[])
        self._num_slots = num_slots
        self._max_positions = max_positions
        self._blocks: Blocks = {}
        self.capacity = 0
        """Positions that each slot holds now."""
        self.generation = 0
        """Rises whenever the memory of the slots is another one."""
        self._index_N: Tensor | None = None
        self._copies: Copies | None = None
        self._num_rows = 0
        self._longest = 0

    def reserve(self, length: int) -> None:
        """Make room for `length` positions in each slot, by half as much again at a time."""
        if length <= self.capacity:
            return
        wanted = max(length, self.capacity * 3 // 2)
        if self._max_positions is not None:
            wanted = max(length, min(wanted, self._max_positions))
        self.capacity = -(-wanted // BLOCK_TOKENS) * BLOCK_TOKENS
        self.generation += 1
        for layer, pair in self._blocks.items():
            self._blocks[layer] = (self._grown(pair[0]), self._grown(pair[1]))

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros(old.shape[0], self.capacity, *old.shape[2:])
        new[:, : old.shape[1]] = old
        return new

    def place(self, blocks: Blocks, rows_K: Tensor, slots_K: Tensor) -> None:
        """Copy rows of a prefill into slots, from position 0 on. `reserve` its length first."""
        for layer, pair in blocks.items():
            held = self._blocks.get(layer)
            if held is None:
                # Zeros, because a masked position still takes part as 0 x value.
                shape = (self._num_slots, self.capacity)
                held = (
                    pair[0].new_zeros(*shape, *pair[0].shape[2:]),
                    pair[1].new_zeros(*shape, *pair[1].shape[2:]),
                )
                self._blocks[layer] = held
            for target, source in zip(held, pair, strict=True):
                length = source.shape[1]
                target[:, :length].index_copy_(0, slots_K, source.index_select(0, rows_K))

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy slots, up to `length` positions. No target is a source."""
        blocks = [block for pair in self._blocks.values() for block in pair]
        source_K, target_K = (row_index(rows, blocks[0].device) for rows in (sources, targets))
        for block in blocks:
            held = block[:, :length]
            held.index_copy_(0, target_K, held.index_select(0, source_K))

    def clear(self, slot: int) -> None:
        """Zero a slot, so that a non-finite value in it can not reach its next sequence."""
        for pair in self._blocks.values():
            for block in pair:
                block[slot] = 0

    def drop(self) -> None:
        """Free the memory; the next `place` takes it again."""
        self._blocks = {}
        self.generation += 1
        self._index_N = None
        self.capacity = 0

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for pair in self._blocks.values() for block in pair)

    def select(self, index_N: Tensor, longest: int, copies: Copies | None = None) -> None:
        """Set where the next forward writes (slot x capacity + position) and how far it reads.

        copies: the forward computes R rows, and what it makes is written for all N.
        """
        self._index_N = index_N
        self._copies = copies
        self._num_rows = len(index_N)
        self._longest = longest

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one position [R, H, 1, D] a row; return views, or copies, [R, H, longest, D]."""
        assert self._index_N is not None
        views = []
        for block, states in zip(self._blocks[layer_idx], (key_states, value_states), strict=True):
            heads, dim = block.shape[2:]
            flat = block.view(-1, heads * dim)
            new = states.reshape(-1, heads * dim)
            held = block[: self._num_rows, : self._longest]
            if self._copies is None:
                flat.index_copy_(0, self._index_N, new)
            else:
                flat.index_copy_(0, self._index_N, new[self._copies.of_N])
                held = held[self._copies.first_R]
            views.append(held.transpose(1, 2))
        return views[0], views[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._longest - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._longest, 0


def row_index(rows: list[int], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.long, device=device)
