"""Transport `shared`: nothing moves, and weights that are not shared are noticed."""

from __future__ import annotations

import copy

import pytest
from tiny import tiny_model

from paceline.errors import WeightError
from paceline.weights.base import WeightPlan
from paceline.weights.receive import receive_into
from paceline.weights.tensors import checksums, named_tensors


def test_the_trainers_own_module_is_accepted_as_it_is():
    model = tiny_model()
    before = checksums(named_tensors(model))
    receive_into(model, WeightPlan("policy", 1, "shared", named_tensors(model)))
    assert checksums(named_tensors(model)) == before


def test_a_copy_would_serve_old_weights_and_is_refused():
    model = tiny_model()
    plan = WeightPlan("policy", 1, "shared", named_tensors(model))
    with pytest.raises(WeightError, match=r'not the trainer\'s own.*engine.weights = "copy"'):
        receive_into(copy.deepcopy(model), plan)


def test_one_tensor_apart_is_named():
    model = tiny_model()
    tensors = named_tensors(model)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].clone()
    with pytest.raises(WeightError, match=r"1 of \d+ tensors.*model\.norm\.weight"):
        receive_into(model, WeightPlan("policy", 1, "shared", tensors))


def test_a_plan_that_lacks_a_tensor_is_refused():
    model = tiny_model()
    tensors = named_tensors(model)
    del tensors["model.norm.weight"]
    with pytest.raises(WeightError, match="names differ"):
        receive_into(model, WeightPlan("policy", 1, "shared", tensors))


def test_a_plan_that_no_trainer_filled_is_refused():
    with pytest.raises(WeightError, match="carries no tensors"):
        receive_into(tiny_model(), WeightPlan("policy", 1, "shared"))
