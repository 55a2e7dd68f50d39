"""Transport `copy`: all tensors or none, into the receiver's own storage."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model

from paceline.errors import WeightError
from paceline.weights.base import WeightPlan
from paceline.weights.receive import receive_into
from paceline.weights.tensors import checksums, named_tensors


def _plan(tensors) -> WeightPlan:
    return WeightPlan("policy", 3, "copy", tensors)


def test_values_arrive_in_the_receivers_own_storage():
    source, target = tiny_model(seed=1), tiny_model(seed=2)
    pointers = {n: t.data_ptr() for n, t in named_tensors(target).items()}
    receive_into(target, _plan(named_tensors(source)))
    assert checksums(named_tensors(target)) == checksums(named_tensors(source))
    assert {n: t.data_ptr() for n, t in named_tensors(target).items()} == pointers
    assert target.lm_head.weight is target.model.embed_tokens.weight


def test_a_receiver_of_another_type_gets_rounded_values():
    source, target = tiny_model(seed=1), tiny_model(seed=2, dtype=torch.bfloat16)
    receive_into(target, _plan(named_tensors(source)))
    for name, tensor in named_tensors(target).items():
        assert torch.equal(tensor, named_tensors(source)[name].to(torch.bfloat16))


def test_tied_weights_come_under_either_name_or_both():
    new = tiny_model(seed=1)
    either = dict(new.named_parameters())
    assert "lm_head.weight" not in either
    other = {("lm_head.weight" if "embed" in name else name): t for name, t in either.items()}
    for sent in (either, other, new.state_dict()):
        target = tiny_model(seed=0)
        receive_into(target, _plan(sent))
        assert all(torch.equal(p, either[name]) for name, p in target.named_parameters())
        assert target.lm_head.weight is target.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight is missing in the sender"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra is unknown to the receiver"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
            r"model\.norm\.weight has shape \(3,\) in the sender and \(32,\)",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
            "are one tied parameter",
        ),
    ],
)
def test_a_plan_that_does_not_fit_changes_nothing(change, match):
    target = tiny_model(seed=2)
    tensors = named_tensors(tiny_model(seed=1))
    change(tensors)
    before = checksums(named_tensors(target))
    with pytest.raises(WeightError, match=match):
        receive_into(target, _plan(tensors))
    assert checksums(named_tensors(target)) == before


def test_a_plan_that_no_trainer_filled_is_refused():
    with pytest.raises(WeightError, match="carries no tensors"):
        receive_into(tiny_model(), WeightPlan("policy", 3, "copy"))
