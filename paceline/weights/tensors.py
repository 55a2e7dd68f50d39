"""The tensors of a model by name, and their checksums."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, sharing the module's storage.

    A tied weight appears once, under its first name. Buffers that the module computes anew
    (rotary frequencies, masks) are left out.
    """
    tensors = {name: tensor.detach() for name, tensor in module.named_parameters()}
    saved = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers():
        if name in saved:
            tensors[name] = buffer.detach()
    return tensors


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A hash of the bits of each tensor; type and shape count."""
    return {name: _checksum(tensor) for name, tensor in tensors.items()}


def relative_error(held: Tensor, sent: Tensor) -> float:
    """Norm of the difference, divided by that of what was sent; infinite if shapes differ, and not
    a number if one of the numbers is none."""
    if held.shape != sent.shape:
        return float("inf")
    expected = sent.detach().cpu().double()
    distance = float((held.detach().cpu().double() - expected).norm())
    scale = float(expected.norm())
    return distance / scale if scale else (float("inf") if distance else 0.0)


def spoil(tensor: Tensor) -> None:
    """Fill with numbers that it did not hold, in place."""
    with torch.no_grad():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        else:
            tensor.bitwise_not_()


def _checksum(tensor: Tensor) -> str:
    digest = blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
