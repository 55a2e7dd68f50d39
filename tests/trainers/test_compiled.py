"""Compiled layers are in place for the time of a forward only, recomputed ones on top of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import tiny_model

from paceline.errors import ConfigError
from paceline.trainers.compiled import CompiledLayers
from paceline.trainers.recompute import decoder_layers, recomputed


class Counting:
    """In the place of a compiler: the same function, counted."""

    def __init__(self) -> None:
        self.made = self.calls = 0

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self.made += 1

        def counted(*values: Any, **named: Any) -> Any:
            self.calls += 1
            return function(*values, **named)

        return counted


def test_layers_run_compiled_within_the_block_and_as_before_after_it() -> None:
    model, other, counting = tiny_model(), tiny_model(seed=2), Counting()
    compiled = CompiledLayers([model, other], counting)
    ids = torch.arange(6)[None]
    plain = model(input_ids=ids).logits
    assert counting.made == 4
    with compiled.active():
        assert torch.equal(model(input_ids=ids).logits, plain)
    assert counting.calls == 2
    model(input_ids=ids)
    assert counting.calls == 2
    assert not any("forward" in vars(layer) for layer in decoder_layers(model))


def test_what_is_recomputed_is_the_compiled_forward() -> None:
    model, counting = tiny_model(), Counting()
    compiled, layers = CompiledLayers([model], counting), decoder_layers(model)
    ids = torch.arange(6)[None]
    with compiled.active(), recomputed(layers):
        loss = model(input_ids=ids).logits.sum()
    loss.backward()
    assert counting.calls == 2 * len(layers)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.compile = true, but Linear has no layer"):
        CompiledLayers([torch.nn.Linear(2, 2)])
