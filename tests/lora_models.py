"""Adapters that are not at their start, and what plain models say, for the tests of LoRA."""

from __future__ import annotations

from typing import Any

import torch

from paceline.weights.adapters import adapted_layers, merged_tensors
from paceline.weights.tensors import named_tensors


def stir(model: Any, seed: int = 0, size: float = 0.2) -> None:
    """Give every B numbers, so that the adapter adds something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            drawn = torch.randn(layer.b.shape, generator=generator, dtype=torch.float64)
            layer.b.copy_(size * drawn)


def merged(model: Any) -> dict[str, torch.Tensor]:
    """What a model amounts to, by the names that it has without an adapter."""
    found = merged_tensors(model, named_tensors(model).items(), torch.Tensor.detach)
    return {name: tensor.clone() for name, tensor in found}


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(24).view(2, 12) * 7 % 60 + 3
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=ids).logits
    return found
