"""Handles as text: tensors in shared memory alone, and nothing but tensors comes out."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.errors import WeightError
from paceline.weights import shared_memory
from paceline.weights.buckets import Bucket, buckets
from paceline.weights.handles import pack, unpack
from paceline.weights.shared_memory import ROOT, Segment


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment(1 << 12)
    yield made
    made.close()


def in_segment(segment: Segment, **tensors: torch.Tensor) -> Bucket:
    (bucket,) = buckets(tensors.items(), segment.size, lambda size, device: segment.tensor)
    return bucket


def test_tensors_are_mapped_and_not_copied(segment: Segment) -> None:
    bucket = in_segment(segment, a=torch.arange(4.0), b=torch.ones(2, 3, dtype=torch.bfloat16))
    text = pack(bucket.named(), segment)
    assert len(text) < 2000
    named = dict(unpack(text))
    assert torch.equal(named["a"], torch.arange(4.0))
    assert named["b"].shape == (2, 3)
    segment.tensor.zero_()
    assert not named["a"].any()


def test_a_text_may_be_read_many_times(segment: Segment) -> None:
    text = pack(in_segment(segment, a=torch.arange(4.0)).named(), segment)
    for _ in range(5):
        assert torch.equal(unpack(text)[0][1], torch.arange(4.0))
    assert (ROOT / segment.name).exists()


def test_the_segment_goes_with_its_owner() -> None:
    segment = Segment(1 << 12)
    path, remover = ROOT / segment.name, segment._remover
    assert path.exists()
    assert path.stat().st_mode & 0o077 == 0
    segment.close()
    segment.close()
    assert not path.exists()
    assert remover.returncode == 0
    forgotten = ROOT / Segment(1 << 12).name
    assert not forgotten.exists()


def test_memory_that_has_gone_is_an_error(segment: Segment) -> None:
    text = pack(in_segment(segment, a=torch.arange(4.0)).named(), segment)
    segment.close()
    with pytest.raises(WeightError, match="the sender's memory can not be mapped"):
        unpack(text)


def test_memory_that_is_not_shared_is_not_handed_over(segment: Segment) -> None:
    with pytest.raises(WeightError, match="does not lie in shared memory"):
        pack([("a", torch.ones(2))], segment)
    with pytest.raises(WeightError, match="does not lie in shared memory"):
        pack([("a", torch.ones(2))])


def test_more_than_the_machine_has_is_said_before_anything_is_written() -> None:
    segment = Segment(1 << 45)
    path = ROOT / segment.name
    segment.reserve(1 << 12)
    with pytest.raises(WeightError, match=r"MiB of shared memory can not be had .*bucket_mb"):
        segment.reserve(1 << 45)
    assert not path.exists()


def test_memory_is_taken_as_it_is_needed() -> None:
    segment = Segment(1 << 30)
    taken = (ROOT / segment.name).stat
    assert taken().st_blocks * 512 < 1 << 20
    for tensors in ([("a", torch.ones(1 << 10))], [("b", torch.ones(1 << 20))]):
        list(buckets(tensors, 1 << 30, lambda size, device: segment.tensor, segment.reserve))
    assert 4 << 20 <= taken().st_blocks * 512 < 8 << 20
    segment.close()


def test_without_torch_s_helper_another_transport_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shared_memory, "_manager", shared_memory._Manager())
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    with pytest.raises(WeightError, match=r'torch_shm_manager is missing.*"collective"'):
        Segment(1 << 12)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("true",)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (Evil(), "system is not allowed"),
        ([("a", Evil())], "system is not allowed"),
        (subprocess.Popen, "Popen is not allowed"),
        (torch.load, "torch.serialization.load is not allowed"),
        (sys.exit, "exit is not allowed"),
        (torch.ones, "not allowed"),
        ([("a", 3)], r"not a list of \(name, tensor\)"),
        ({"a": 3}, r"not a list of \(name, tensor\)"),
        ([(torch.float32, 3)], r"not a list of \(name, tensor\)"),
    ],
)
def test_a_pickle_of_anything_else_is_refused(held: object, message: str) -> None:
    with pytest.raises(WeightError, match=message):
        unpack(b64encode(pickle.dumps(held)).decode())


@pytest.mark.parametrize("text", ["", "no base64!", "AAAA", b64encode(b"\x80\x04").decode()])
def test_what_is_no_pickle_is_refused(text: str) -> None:
    with pytest.raises(WeightError, match="no handles of tensors"):
        unpack(text)
