"""The names and shapes that a model's tensors have in a Hugging Face checkpoint.

In memory they may differ: transformers fuses the experts of a mixture into one tensor, for
example, and a tied tensor has several names. Engines know the names of checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from paceline.weights.adapters import merged_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

LAYER = re.compile(r"^.*?\.\d+\.")
"""What the names of one layer's tensors start with; nothing is converted across layers."""


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers, each once, a tied one under the name that is saved.

    They are the module's own: of a sharded one the shards.
    """
    tied = getattr(module, "all_tied_weights_keys", None) or {}
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    saved = module.state_dict(keep_vars=True)
    for name, tensor in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    for key, found in names.items():
        yield next((name for name in found if name not in tied), found[0]), tensors[key]
    for name, buffer in module.named_buffers():
        if name in saved:
            yield name, buffer


def as_checkpoint(
    module: nn.Module, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the form of a checkpoint. At most those of one layer are held at a time.

    module: a transformers model, or one whose tensors need no conversion. tensors: with names as
    `own_tensors` gives them, in its order, whole and not sharded, and adapters merged.
    """
    if not hasattr(module, "config") or not _has_conversions(module):
        yield from tensors
        return
    layer, held = "", dict[str, "Tensor"]()
    for name, tensor in tensors:
        found = LAYER.match(name)
        prefix = found.group() if found else name
        if prefix != layer and held:
            yield from _revert(module, held).items()
            held = {}
        layer = prefix
        held[name] = tensor.detach()
    yield from _revert(module, held).items()


def _has_conversions(module: nn.Module) -> bool:
    """Tried on tensors without numbers: what is not touched keeps name and identity."""
    bare = dict(merged_tensors(module, own_tensors(module), _bare))
    reverted = _revert(module, dict(bare))
    return reverted.keys() != bare.keys() or any(
        reverted[name].shape != tensor.shape for name, tensor in bare.items()
    )


def _bare(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _revert(module: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    reverted: dict[str, Tensor] = revert_weight_conversion(module, tensors)
    return reverted
