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

from paceline.trainers.recompute import decoder_layers, replaced

if TYPE_CHECKING:
    from torch import nn

Call = Callable[..., Any]


def compiled(forward: Call) -> Call:
    """For shapes of all kinds: rows are as long as their answers, and every new shape costs."""
    made: Call = torch.compile(forward, dynamic=True)
    return made


class CompiledLayers:
    """The decoder layers of some models; each is compiled when it is first used."""

    def __init__(self, models: Sequence[nn.Module], compiler: Any = compiled) -> None:
        """compiler: makes another function of a forward."""
        self._layers = [layer for model in models for layer in decoder_layers(model, "compile")]
        self._forwards: list[Call] = [compiler(one.forward) for one in self._layers]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it, the layers run compiled."""
        with replaced(self._layers, self._forwards):
            yield
