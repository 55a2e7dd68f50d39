"""Decoder layers compiled by `torch.compile`, for the time of the trainer's forward only.

What is left to eager kernels between a small model's matrix products (norms, rotations, casts,
residuals) takes longer than the products themselves; compiled, they are a few kernels. Outside of
the forward the model, which an engine may share, is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn

Call = Callable[..., Any]


class CompiledLayers:
    """The layers' forwards, compiled when they are first used; later shapes are dynamic."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._forwards: list[Call] = [torch.compile(layer.forward) for layer in layers]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it, the layers run compiled."""
        with replaced(self._layers, self._forwards):
            yield


@contextmanager
def replaced(layers: Sequence[nn.Module], forwards: Sequence[Call]) -> Iterator[None]:
    """Within it, each layer has the forward that stands in its place in `forwards`."""
    before: list[Call | None] = [vars(layer).get("forward") for layer in layers]
    for layer, forward in zip(layers, forwards, strict=True):
        layer.forward = forward
    try:
        yield
    finally:
        for layer, former in zip(layers, before, strict=True):
            if former is None:
                del layer.forward
            else:
                layer.forward = former
