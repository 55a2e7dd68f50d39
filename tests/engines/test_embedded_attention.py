"""Grouped decode attention against repeated keys and values."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_model

from paceline.engines import embedded_attention
from paceline.engines.embedded_attention import NAME, grouped, grouped_attention


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (6, 1), (4, 4)])
def test_it_is_attention_with_repeated_keys_and_values(heads: int, groups: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(3, heads, 1, 8, dtype=torch.float64)
    key, value = torch.randn(2, 3, groups, 11, 8, dtype=torch.float64)
    hidden = torch.rand(3, 1, 1, 11) < 0.3
    mask = torch.zeros(3, 1, 1, 11, dtype=torch.float64).masked_fill(hidden, -1e30)
    module = SimpleNamespace(num_key_value_groups=heads // groups, is_causal=True)
    found, _ = grouped_attention(module, query, key, value, mask, scaling=0.3)  # type: ignore[arg-type]
    repeated = [x.repeat_interleave(heads // groups, 1) for x in (key, value)]
    weights = (query @ repeated[0].transpose(2, 3) * 0.3 + mask).softmax(-1)
    wanted = (weights @ repeated[1]).transpose(1, 2)
    assert torch.allclose(found, wanted, atol=1e-12)


def test_a_model_uses_it_only_inside_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_attention, "IS_BUILT_IN", False)
    model = tiny_model(dtype=torch.float64)
    ids = torch.tensor([[5], [7]])
    plain = model(ids).logits
    with grouped(model.config):
        assert model.config._attn_implementation == NAME
        inside = model(ids).logits
    assert model.config._attn_implementation == "sdpa"
    assert torch.allclose(plain, inside, atol=1e-12)
    model.config._attn_implementation = "eager"
    with grouped(model.config):
        assert model.config._attn_implementation == "eager"
