from __future__ import annotations

import json
import sys

import pytest

from paceline.data.gym_main import packed, problem, unpacked
from paceline.data.loader import load_source
from paceline.data.sources import ReasoningGymSource
from paceline.errors import ConfigError, DeadlineError, MissingExtraError


def load(tmp_path, task="chain_sum", **keys):
    return load_source(ReasoningGymSource(task=task, **keys), base=tmp_path)


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingExtraError, match=r"paceline\[reasoning-gym\]"):
        load(tmp_path)


def test_packing_keeps_tuples_and_keys():
    value = {"grid": ((1, 2), (3,)), "by": {1: ["a"], (2, 3): {}}, "()": [1], "n": None}
    assert unpacked(json.loads(json.dumps(packed(value)))) == value


def test_orders_are_checked():
    from dataclasses import dataclass

    @dataclass
    class Config:
        seed: int = 0
        size: int = 1
        min_terms: int = 2

    datasets = {"chain_sum": (None, Config)}

    def found(task="chain_sum", **params):
        return problem({"task": task, "params": params}, datasets)

    assert found(min_terms=3) is None
    assert found("chain_sums") == "no task 'chain_sums'; did you mean 'chain_sum'?"
    assert found(max=1) == "task 'chain_sum' has no parameter 'max'; there is min_terms"
    assert found(seed=1) == "seed stands beside params, not in it"
    assert "several [[data.sources]]" in found("composite")


@pytest.mark.slow
def test_prompts_carry_what_their_scorer_needs(tmp_path):
    reasoning_gym = pytest.importorskip("reasoning_gym")
    prompts = load(tmp_path, size=4, seed=7, params={"min_terms": 2, "max_terms": 2})
    assert [p.id for p in prompts.prompts] == [f"chain_sum-7-{i}" for i in range(4)]
    for prompt in prompts.prompts:
        gym = prompt.metadata["reasoning_gym"]
        dataset = reasoning_gym.create_dataset(
            gym["task"], seed=gym["seed"], size=gym["size"], **gym["params"]
        )
        assert dataset[gym["index"]] == gym["entry"]
        assert prompt.text == gym["entry"]["question"]
        assert dataset.score_answer(prompt.answer, gym["entry"]) == 1.0
        assert json.loads(json.dumps(prompt.metadata))
    assert load(tmp_path, size=4, seed=8).fingerprint != prompts.fingerprint


@pytest.mark.slow
def test_a_task_that_depends_on_the_order_of_sets_is_the_same_in_every_process(
    tmp_path, monkeypatch
):
    pytest.importorskip("reasoning_gym")
    found = set()
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        found.add(load(tmp_path, "ransom_note", size=5).fingerprint)
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "params", "message"),
    [
        ("chain_sums", {}, "source 'chain_sums': no task 'chain_sums'; did you mean 'chain_sum'"),
        ("chain_sum", {"min_terms": -1}, "AssertionError: min_terms must be positive"),
    ],
)
def test_wrong_tasks_and_parameters(tmp_path, task, params, message):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, task, params=params)


def test_generating_has_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", sys.modules[__name__])
    monkeypatch.setattr("paceline.data.gym.find_spec", lambda name: object())
    with pytest.raises(DeadlineError, match=r"500 prompts were not there after 0\.01 s"):
        load(tmp_path, timeout_s=0.01)
