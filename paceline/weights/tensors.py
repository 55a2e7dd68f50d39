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


def _checksum(tensor: Tensor) -> str:
    digest = blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
