"""Activation checkpointing of decoder layers that works in evaluation mode.

transformers recomputes activations only in training mode, which would switch dropout on, and
log-probs must not be random. So the layers are wrapped here, for the time of a forward only:
outside of it the model, which an engine may share, is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers whose activations can be recomputed. Raises ConfigError if there are none."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"trainer.activation_checkpointing = true, but {type(model).__name__} has no layer "
            "that supports it; set it to false and lower trainer.max_tokens_per_micro_batch"
        )
    return layers


@contextmanager
def recomputed(layers: list[nn.Module]) -> Iterator[None]:
    """Within it, a forward of the layers keeps their inputs only; the backward may come later."""
    for layer in layers:
        layer.forward = partial(_checkpointed, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _checkpointed(forward: Callable[..., Any], *values: Any, **named: Any) -> Any:
    return checkpoint(forward, *values, use_reentrant=False, preserve_rng_state=False, **named)
