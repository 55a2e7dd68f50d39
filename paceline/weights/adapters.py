"""Low-rank adapters inside a model, as PEFT puts them there, and the weights that they amount to.

An adapted layer holds the layer that it stands for as `base_layer`, and W + scale B A is what the
two of them compute. Receivers and folders of models know nothing of that: they get the sum, under
the name that W has without an adapter.

Legend: R rank, I inputs, O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paceline.weights.tensors import named_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

ADAPTER = "default"
"""What the only adapter of a model is called in it."""
INNER = ".base_layer."

Gather = Callable[["Tensor"], "Tensor"]
"""Makes the whole of a tensor that a model holds, which may be a shard."""


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """One matrix with its adapter."""

    module: Any
    """Of PEFT."""

    @property
    def a(self) -> nn.Parameter:
        """[R, I]"""
        found: nn.Parameter = self.module.lora_A[ADAPTER].weight
        return found

    @property
    def b(self) -> nn.Parameter:
        """[O, R]"""
        found: nn.Parameter = self.module.lora_B[ADAPTER].weight
        return found

    @property
    def scale(self) -> float:
        return float(self.module.scaling[ADAPTER])

    def merged(self, weight: Tensor, a_RI: Tensor, b_OR: Tensor) -> Tensor:
        """W + scale B A in the type of W, rounded once."""
        kind = torch.promote_types(a_RI.dtype, weight.dtype)
        added_OI = (b_OR.to(kind) @ a_RI.to(kind)) * self.scale
        added = added_OI.T if self.module.fan_in_fan_out else added_OI
        return (weight.to(kind) + added).to(weight.dtype)


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLayer]:
    """Every adapted layer by its name in the model; empty for a model without adapters."""
    return {
        name: AdaptedLayer(module)
        for name, module in model.named_modules()
        if hasattr(module, "base_layer") and hasattr(module, "lora_A")
    }


def plain_name(name: str) -> str:
    """What a tensor of an adapted layer is called without the adapter."""
    return name.replace(INNER, ".")


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """`named_tensors` of the model without its adapters."""
    within = _parts(adapted_layers(model))
    return {plain_name(n): t for n, t in named_tensors(model).items() if n not in within}


@torch.no_grad()
def merged_tensors(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]], gather: Gather
) -> Iterator[tuple[str, Tensor]]:
    """What the model holds, with adapters added to what they adapt: one tensor at a time.

    tensors: by their names in the model. Of a model without adapters they come as they are.
    """
    layers = adapted_layers(model)
    within = _parts(layers)
    for name, tensor in tensors:
        if name in within:
            continue
        owner, _, last = name.partition(INNER)
        if last == "weight" and owner in layers:
            layer = layers[owner]
            merged = layer.merged(gather(tensor), gather(layer.a), gather(layer.b))
            yield plain_name(name), merged
        else:
            yield plain_name(name), gather(tensor)


def _parts(layers: Iterable[str]) -> frozenset[str]:
    """Names of the adapters' own tensors in the model."""
    return frozenset(
        f"{name}.{part}.{ADAPTER}.weight" for name in layers for part in ("lora_A", "lora_B")
    )
