from __future__ import annotations

import pytest
import torch
from tiny import tiny_model

from paceline.engines.embedded_weights import OwnWeights
from paceline.errors import WeightError


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_tied_weights_come_under_either_name_or_both() -> None:
    new = tiny_model(seed=1)
    assert "lm_head.weight" not in dict(new.named_parameters())
    either = snapshot(new)
    other = {("lm_head.weight" if "embed" in name else name): t for name, t in either.items()}
    for sent in (either, other, new.state_dict()):
        model = tiny_model(seed=0)
        OwnWeights(model).copy(sent)
        assert all(torch.equal(p, either[name]) for name, p in model.named_parameters())
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_copies_are_cast_and_share_nothing() -> None:
    model, new = tiny_model(seed=0, dtype=torch.bfloat16), tiny_model(seed=1)
    OwnWeights(model).copy(dict(new.named_parameters()))
    norm = model.model.norm.weight
    assert norm.dtype == torch.bfloat16
    with torch.no_grad():
        new.model.norm.weight.fill_(7)
    assert not (norm == 7).any()


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "tie"])
def test_a_bad_publish_names_the_fault_and_changes_nothing(fault: str) -> None:
    model = tiny_model(seed=0)
    before, sent = snapshot(model), snapshot(tiny_model(seed=1))
    if fault == "missing":
        del sent["model.norm.weight"]
        message = r"1 missing \(model.norm.weight\)"
    elif fault == "unknown":
        sent["model.extra"] = torch.zeros(1)
        message = r"1 unknown \(model.extra\)"
    elif fault == "shape":
        sent["model.norm.weight"] = torch.zeros(3)
        message = r"model.norm.weight was sent with shape \(3,\)"
    else:
        sent["lm_head.weight"] = sent["model.embed_tokens.weight"] + 1
        message = "are one tied parameter"
    with pytest.raises(WeightError, match=message):
        OwnWeights(model).copy(sent)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_drop_frees_and_allocate_brings_back_the_shape() -> None:
    model = tiny_model(seed=0)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    weights = OwnWeights(model)
    weights.drop()
    weights.drop()
    assert sum(p.nbytes for p in model.parameters()) == 0
    with pytest.raises(WeightError, match="asleep"):
        weights.copy(snapshot(tiny_model(seed=1)))
    weights.allocate()
    weights.allocate()
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    weights.copy(snapshot(tiny_model(seed=1)))
    assert all(
        torch.equal(p, q)
        for p, q in zip(model.parameters(), tiny_model(seed=1).parameters(), strict=True)
    )
