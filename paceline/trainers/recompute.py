"""Activation checkpointing of decoder layers that works in evaluation mode.

transformers recomputes activations only in training mode, which would switch dropout on, and
log-probs must not be random. So the layers are wrapped here, for the time of a forward only:
outside of it the model, which an engine may share, is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


Call = Callable[..., Any]


def decoder_layers(model: nn.Module, key: str = "activation_checkpointing") -> list[nn.Module]:
    """The layers that are repeated, as transformers marks them. Raises ConfigError if there are
    none. key: of `[trainer]`, which needs them."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"trainer.{key} = true, but {type(model).__name__} has no layer that supports it; set "
            "it to false and lower trainer.max_tokens_per_micro_batch"
        )
    return layers


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


@contextmanager
def recomputed(layers: list[nn.Module]) -> Iterator[None]:
    """Within it, a forward of the layers keeps their inputs only; the backward may come later."""
    with replaced(layers, [partial(_checkpointed, layer.forward) for layer in layers]):
        yield


def _checkpointed(forward: Callable[..., Any], *values: Any, **named: Any) -> Any:
    return checkpoint(forward, *values, use_reentrant=False, preserve_rng_state=False, **named)
