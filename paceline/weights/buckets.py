"""Tensors in flat buckets: what a publish needs of extra memory is one bucket.

Inside a bucket, tensors lie one behind the other without gaps, so that a receiver which knows
names, types and shapes finds each of them in the flat bytes. One whose type would not be aligned
there starts the next bucket.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.weights.base import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

Buffer = Callable[[int, torch.device], "Tensor"]
"""Number of bytes, device of the tensors -> a flat uint8 tensor of at least as many bytes."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Valid until the next one is made."""

    flat: Tensor
    """uint8 [num_bytes]: all tensors, in order."""
    tensors: tuple[TensorInfo, ...]

    def named(self) -> list[tuple[str, Tensor]]:
        """The tensors, as views of the flat bytes."""
        return views(self.flat, self.tensors)


def buckets(
    tensors: Iterable[tuple[str, Tensor]],
    max_bytes: int,
    buffer: Buffer | None = None,
    reserve: Callable[[int], None] | None = None,
) -> Iterator[Bucket]:
    """Copy the tensors, in order, into buckets of at most `max_bytes`.

    A tensor that is larger gets a bucket of its own. Each tensor is copied before the next one is
    asked for; only the one that starts a bucket waits until the bucket before it is done with.
    buffer: gives the memory of each bucket, which may be the same each time; default: one buffer
    on the tensors' device, grown when a tensor needs more. reserve: called before each copy with
    the end of what will be in use of the buffer.
    """
    buffer = buffer or OneBuffer()
    flat = torch.empty(0, dtype=torch.uint8)
    infos: list[TensorInfo] = []
    used = 0
    for name, tensor in tensors:
        end = used + tensor.nbytes
        if infos and (end > max_bytes or used % tensor.element_size()):
            yield Bucket(flat[:used], tuple(infos))
            infos, used, end = [], 0, tensor.nbytes
        if not infos:
            flat = flat[:0].clone()  # lets go of the former buffer before the next one comes
            flat = buffer(max(tensor.nbytes, max_bytes), tensor.device)
        if reserve is not None:
            reserve(end)
        place = flat[used:end].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor.detach())
        infos.append(describe(name, tensor))
        used = end
    if infos:
        yield Bucket(flat[:used], tuple(infos))


class OneBuffer:
    """The same memory for each bucket, on the tensors' device or on another."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._flat: Tensor | None = None

    def __call__(self, size: int, device: torch.device) -> Tensor:
        device = self._device or device
        flat = self._flat
        if flat is None or len(flat) < size or flat.device != device:
            self._flat = flat = None  # the old one goes before the new one comes
            self._flat = flat = torch.empty(size, dtype=torch.uint8, device=device)
        return flat


def describe(name: str, tensor: Tensor) -> TensorInfo:
    """The tensor without its numbers."""
    return TensorInfo(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def num_bytes(info: TensorInfo) -> int:
    """Of the tensor's numbers."""
    return math.prod(info.shape) * dtype_of(info).itemsize


def dtype_of(info: TensorInfo) -> torch.dtype:
    """torch's own object for the name."""
    found = getattr(torch, info.dtype, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"tensor {info.name}: torch has no type {info.dtype!r}")
    return found


def views(flat: Tensor, infos: Iterable[TensorInfo]) -> list[tuple[str, Tensor]]:
    """The tensors in the flat bytes of a bucket."""
    found, start = [], 0
    for info in infos:
        end = start + num_bytes(info)
        found.append((info.name, flat[start:end].view(dtype_of(info)).view(info.shape)))
        start = end
    return found
