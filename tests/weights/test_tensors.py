"""Tensors by name, and checksums that see every bit."""

from __future__ import annotations

import torch
from tiny import tiny_model

from paceline.weights.tensors import checksums, named_tensors


def test_a_tied_weight_is_there_once_and_storage_is_shared():
    model = tiny_model()
    tensors = named_tensors(model)
    assert "lm_head.weight" not in tensors
    assert tensors["model.embed_tokens.weight"].data_ptr() == model.lm_head.weight.data_ptr()
    assert not any(tensor.requires_grad for tensor in tensors.values())


def test_saved_buffers_are_in_and_computed_ones_are_not():
    module = torch.nn.Module()
    module.register_buffer("saved", torch.ones(2))
    module.register_buffer("computed", torch.ones(2), persistent=False)
    assert list(named_tensors(module)) == ["saved"]
    assert not any("inv_freq" in name for name in named_tensors(tiny_model()))


def test_a_checksum_sees_one_bit_the_type_and_the_shape():
    tensor = torch.arange(6.0)
    (plain,) = checksums({"x": tensor}).values()
    flipped = tensor.clone()
    flipped.view(torch.int32)[3] ^= 1
    others = [flipped, tensor.double(), tensor.reshape(2, 3), tensor.to(torch.bfloat16)]
    sums = [checksums({"x": other})["x"] for other in others]
    assert len({plain, *sums}) == 5
    assert checksums({"x": tensor.reshape(2, 3).t().contiguous().t().reshape(6)})["x"] == plain


def test_scalars_and_empty_tensors_have_checksums():
    sums = checksums({"scalar": torch.tensor(1.0), "empty": torch.zeros(0)})
    assert len(set(sums.values())) == 2
