"""Recomputed activations: the same numbers, fewer kept tensors, a model left as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import tiny_model
from trainer_rows import assert_equal, gradients, make_trainer, model64, random_rows
from transformers import BloomConfig, BloomForCausalLM

from paceline.errors import ConfigError
from paceline.trainers.recompute import decoder_layers, recomputed


def test_gradients_and_metrics_equal_those_without():
    rows = random_rows()
    plain = gradients(make_trainer(), rows)
    saved = gradients(make_trainer(activation_checkpointing=True), rows)
    assert saved[0] == plain[0]
    assert_equal(saved[1], plain[1])


def test_fewer_tensors_are_kept_for_the_backward():
    model = tiny_model(layers=4)
    layers = decoder_layers(model)
    assert len(layers) == 4
    ids = torch.arange(3, 27).reshape(2, 12)

    def kept_numel() -> int:
        total = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(input_ids=ids, use_cache=False).logits.sum()
        return total

    plain = kept_numel()
    with recomputed(layers):
        assert kept_numel() < plain / 3


def test_the_model_is_as_it_was_afterwards_and_copies_are_their_own():
    model = model64()
    layers = decoder_layers(model)
    with pytest.raises(RuntimeError, match="within"), recomputed(layers):
        raise RuntimeError("within")
    assert all("forward" not in vars(layer) for layer in layers)
    copied = copy.deepcopy(model)
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        before = copied(input_ids=ids).logits
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(copied(input_ids=ids).logits, before)


def test_dropout_stays_off():
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.5)
    model = BloomForCausalLM(config).eval()
    ids = torch.tensor([[3, 4, 5, 6]])
    plain = model(input_ids=ids, use_cache=False).logits
    with recomputed(decoder_layers(model)):
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, plain)


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ConfigError, match="activation_checkpointing"):
        decoder_layers(torch.nn.Linear(2, 2))
