from __future__ import annotations

import numpy as np
import torch

from paceline.engines.embedded_cache import (
    BLOCK_TOKENS,
    Copies,
    PrefillCache,
    SlotCache,
    row_index,
)

CPU = torch.device("cpu")


def prefilled(rows: int, length: int, seed: int = 0) -> PrefillCache:
    """Two layers with unequal sizes of keys and values."""
    generator = torch.Generator().manual_seed(seed)
    cache = PrefillCache()
    for layer in range(2):
        keys = torch.randn(rows, 2, length, 3, generator=generator)
        values = torch.randn(rows, 2, length, 5, generator=generator)
        assert cache.update(keys, values, layer)[0] is keys
    return cache


def test_rows_are_placed_copied_and_read_back_as_views() -> None:
    source = prefilled(2, 4)
    cache = SlotCache(3)
    cache.reserve(4)
    cache.place(source.blocks, row_index([1, 0, 1], CPU), row_index([0, 1, 2], CPU))
    cache.select(torch.tensor([s * cache.capacity + 4 for s in range(3)]), longest=5)
    new = torch.ones(3, 2, 1, 3), torch.full((3, 2, 1, 5), 2.0)
    keys, values = cache.update(*new, layer_idx=1)
    assert keys.shape == (3, 2, 5, 3)
    assert values.shape == (3, 2, 5, 5)
    for slot, row in enumerate([1, 0, 1]):
        assert torch.equal(keys[slot, :, :4], source.blocks[1][0][row].transpose(0, 1))
        assert torch.equal(values[slot, :, :4], source.blocks[1][1][row].transpose(0, 1))
    assert torch.equal(keys[:, :, 4:], new[0])
    again, _ = cache.update(*new, layer_idx=1)
    assert again.data_ptr() == keys.data_ptr()


def test_what_is_computed_once_is_written_for_all_its_copies() -> None:
    source = prefilled(2, 4)
    cache = SlotCache(3)
    cache.reserve(4)
    cache.place(source.blocks, row_index([1, 0, 1], CPU), row_index([0, 1, 2], CPU))
    index = torch.tensor([s * cache.capacity + 4 for s in range(3)])
    # Slots 0 and 2 hold the same; slot 1 is its own.
    cache.select(index, 5, Copies(first_R=torch.tensor([0, 1]), of_N=torch.tensor([0, 1, 0])))
    new = torch.randn(2, 2, 1, 3), torch.randn(2, 2, 1, 5)
    found = cache.update(*new, layer_idx=1)
    cache.select(index, 5)
    for held, computed, given in zip(
        (block[:3, :5].transpose(1, 2) for block in cache._blocks[1]), found, new, strict=True
    ):
        assert torch.equal(computed, held[[0, 1]])
        assert torch.equal(held[0], held[2])
        assert torch.equal(held[:2, :, 4:], given)


def test_growing_keeps_what_is_held_and_zeroes_the_rest() -> None:
    source = prefilled(1, 3)
    cache = SlotCache(2, max_positions=1000)
    cache.reserve(3)
    assert cache.capacity == BLOCK_TOKENS
    cache.place(source.blocks, row_index([0], CPU), row_index([1], CPU))
    cache.reserve(BLOCK_TOKENS + 1)
    assert cache.capacity == 2 * BLOCK_TOKENS
    cache.select(torch.tensor([0, cache.capacity + 3]), longest=cache.capacity)
    keys, _ = cache.update(torch.zeros(2, 2, 1, 3), torch.zeros(2, 2, 1, 5), 0)
    assert torch.equal(keys[1, :, :3], source.blocks[0][0][0].transpose(0, 1))
    assert keys[:, :, 4:].abs().sum() == 0


def test_growth_stops_at_the_context_unless_more_is_asked_for() -> None:
    cache = SlotCache(1, max_positions=100)
    cache.reserve(90)
    assert cache.capacity == 128
    cache.reserve(129)
    assert cache.capacity == 192


def test_move_clear_and_drop() -> None:
    source = prefilled(2, 2)
    cache = SlotCache(2)
    cache.reserve(2)
    cache.place(source.blocks, row_index([0, 1], CPU), row_index([0, 1], CPU))
    cache.move([1], [0], 2)
    cache.clear(1)
    cache.select(torch.tensor([2, cache.capacity + 2]), longest=3)
    keys, values = cache.update(torch.zeros(2, 2, 1, 3), torch.zeros(2, 2, 1, 5), 0)
    assert torch.equal(keys[0, :, :2], source.blocks[0][0][1].transpose(0, 1))
    assert values[1].abs().sum() == 0
    assert cache.num_bytes == 2 * 2 * 2 * cache.capacity * (3 + 5) * 4
    cache.drop()
    assert (cache.num_bytes, cache.capacity) == (0, 0)


def test_sizes_told_to_the_mask_builder() -> None:
    cache = SlotCache(2)
    cache.select(torch.zeros(2, dtype=torch.long), longest=7)
    assert cache.get_seq_length() == 6
    assert cache.get_mask_sizes(1, 0) == (7, 0)
    assert PrefillCache().get_seq_length() == 0
    assert PrefillCache().get_mask_sizes(np.int64(5), 0) == (5, 0)
