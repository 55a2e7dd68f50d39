"""Flat buckets: whatever goes in comes out, in order, bit for bit, in bounded memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.weights.base import TensorInfo
from paceline.weights.buckets import OneBuffer, buckets, dtype_of, num_bytes, views

KINDS = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float64]
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), SHAPES), max_size=12),
    st.integers(1, 300),
    st.integers(0, 2**31),
)
def test_all_kinds_and_shapes_come_through(
    kinds: list[tuple[torch.dtype, tuple[int, ...]]], max_bytes: int, seed: int
) -> None:
    drawn = torch.Generator().manual_seed(seed)
    sent = [
        (f"t{i}", torch.randint(0, 2, shape, generator=drawn).to(kind))
        for i, (kind, shape) in enumerate(kinds)
    ]
    got: list[tuple[str, torch.Tensor]] = []
    for bucket in buckets(sent, max_bytes):
        assert len(bucket.flat) <= max_bytes or len(bucket.tensors) == 1
        assert len(bucket.flat) == sum(map(num_bytes, bucket.tensors))
        got += [(name, tensor.clone()) for name, tensor in bucket.named()]
    assert [name for name, _ in got] == [name for name, _ in sent]
    for (_, one), (_, other) in zip(got, sent, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(one, other)


def test_no_tensors_are_no_buckets() -> None:
    assert list(buckets([], 100)) == []


def test_a_large_tensor_travels_alone_between_full_buckets() -> None:
    sizes = [3, 3, 50, 3, 4]
    made = buckets([(str(n), torch.zeros(n)) for n in sizes], 28)
    assert [[t.shape[0] for t in b.tensors] for b in made] == [[3, 3], [50], [3, 4]]


def test_a_type_that_would_not_be_aligned_starts_a_bucket() -> None:
    sent = [("a", torch.zeros(3, dtype=torch.bfloat16)), ("b", torch.zeros(1))]
    assert [[t.name for t in b.tensors] for b in buckets(sent, 100)] == [["a"], ["b"]]
    sent = [("a", torch.zeros(2, dtype=torch.bfloat16)), ("b", torch.zeros(1))]
    assert [[t.name for t in b.tensors] for b in buckets(sent, 100)] == [["a", "b"]]


def test_the_buffer_is_used_again_and_tensors_are_not_kept() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(6):
            tensor = torch.full((4,), float(i))
            seen.append(weakref.ref(tensor))
            assert sum(ref() is not None for ref in seen) <= 2
            yield str(i), tensor

    places = {bucket.flat.data_ptr() for bucket in buckets(gathered(), 32)}
    assert len(places) == 1


def test_gradients_and_views_are_no_matter() -> None:
    weight = torch.nn.Parameter(torch.arange(12.0).view(3, 4))
    (bucket,) = buckets([("w", weight), ("v", weight.detach().t())], 1000)
    named = dict(bucket.named())
    assert torch.equal(named["w"], weight)
    assert torch.equal(named["v"], weight.t())


def test_a_buffer_of_another_device() -> None:
    (bucket,) = buckets([("w", torch.ones(3))], 1000, OneBuffer(torch.device("meta")))
    assert bucket.flat.is_meta
    assert bucket.tensors == (TensorInfo("w", "float32", (3,)),)


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(ValueError, match="tensor w: torch has no type 'float5'"):
        dtype_of(TensorInfo("w", "float5", (1,)))
    with pytest.raises(ValueError, match="no type 'nn'"):
        views(torch.zeros(4, dtype=torch.uint8), [TensorInfo("w", "nn", (1,))])
