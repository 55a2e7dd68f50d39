"""Weights of a GPU on their way to other processes: IPC handles, and NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from weight_receiver import ReceiverProcess, receiver_processes

from paceline.weights.base import Meeting, Parcel
from paceline.weights.source import Outbox
from paceline.weights.tensors import checksums

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
BUCKET = 4 << 20


@pytest.fixture(scope="module")
def receiver() -> Iterator[ReceiverProcess]:
    with receiver_processes(1) as (started,):
        assert started.ask("ready")
        yield started


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator("cuda").manual_seed(seed)
    return {
        f"layer{i}": torch.randn(512, 1024, generator=drawn, device="cuda").to(kind)
        for i, kind in enumerate([torch.bfloat16, torch.float32] * 6)
    }


def test_ipc_handles_bring_every_bit_and_memory_does_not_grow(receiver: ReceiverProcess) -> None:
    tensors = tensors_of(0)
    box = Outbox(lambda: tensors.items(), device=torch.device("cuda", 0))
    held = []
    for seed in range(12):
        tensors |= tensors_of(seed)
        box.open(seed, "handles", BUCKET)
        num_parcels = 0
        while (parcel := box.next_parcel()) is not None:
            num_parcels += 1
            assert receiver.ask("unpacked", text=parcel.handles[0]) == len(parcel.tensors)
        box.close()
        assert num_parcels > 3
        assert receiver.ask("checksums") == checksums(tensors)
        torch.cuda.ipc_collect()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] <= held[2]


def metadata(parcel: Parcel) -> dict[str, Any]:
    return {
        "names": [t.name for t in parcel.tensors],
        "dtypes": [t.dtype for t in parcel.tensors],
        "shapes": [list(t.shape) for t in parcel.tensors],
    }


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nccl_brings_every_bit(receiver: ReceiverProcess) -> None:
    tensors = tensors_of(1)
    box = Outbox(lambda: tensors.items(), device=torch.device("cuda", 0), timeout_s=60)
    address, port = box.meeting_point()
    meeting = Meeting("weights", address, port, 2, "nccl")
    receiver.tell("join_nccl", address=address, port=port, rank=1, size=2, name="weights")
    box.meet(meeting)
    receiver.answer()
    for seed in (1, 2):
        tensors |= tensors_of(seed)
        box.open(seed, "collective", BUCKET)
        while (parcel := box.next_parcel()) is not None:
            receiver.tell("receive_nccl", **metadata(parcel))
            box.broadcast()
            receiver.answer()
        box.close()
        assert receiver.ask("checksums") == checksums(tensors)
    box.dispose()
