"""The table of algorithms, and what loading it may cost."""

import subprocess
import sys

import numpy as np
import pytest
from algorithm_settings import VARIANTS, make_algorithm
from batches import micro_batch, random_rollout, score_rollout

from paceline.algorithms import ALGORITHMS
from paceline.algorithms.base import Algorithm
from paceline.algorithms.sft import Sft
from paceline.data.packing import read_scores
from paceline.observe.catalogue import describe


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_each_row_is_an_algorithm_of_that_kind(kind: str) -> None:
    algorithm: Algorithm = ALGORITHMS[kind]()
    assert algorithm.kind == kind
    assert algorithm.model_config["frozen"]
    fields = type(algorithm).model_fields
    assert [name for name, field in fields.items() if not field.description] == []


def test_loading_the_table_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, paceline.algorithms, paceline.evals_settings; "
        "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("name", [*VARIANTS, "sft"])
def test_every_metric_is_in_the_catalogue(name: str) -> None:
    algorithm: Algorithm = Sft() if name == "sft" else make_algorithm(name)
    groups = random_rollout(np.random.default_rng(0))
    scored = score_rollout(groups, algorithm, seed=0)
    inputs = micro_batch(scored)
    names = [f"train/{name}" for name in algorithm.loss(inputs).means]
    if algorithm.critic is not None:
        names += [f"critic/{name}" for name in algorithm.critic.loss(inputs).means]
    scores = read_scores(groups, "policy", [one.row for one in scored])
    names += algorithm.credit(groups, "policy", scores).metrics
    assert [name for name in names if describe(name) is None] == []
