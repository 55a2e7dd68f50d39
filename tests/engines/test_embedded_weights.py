from __future__ import annotations

from tiny import tiny_model

from paceline.engines.embedded_weights import OwnWeights


def test_drop_frees_and_allocate_brings_back_the_shape() -> None:
    model = tiny_model(seed=0)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    weights = OwnWeights(model)
    weights.drop()
    weights.drop()
    assert sum(p.nbytes for p in model.parameters()) == 0
    weights.allocate()
    weights.allocate()
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    assert model.lm_head.weight is model.model.embed_tokens.weight
