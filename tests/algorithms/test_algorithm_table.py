"""The table of algorithms, and what loading it may cost."""

import subprocess
import sys

import numpy as np
import pytest
from batches import micro_batch, random_rollout, score_rollout

from paceline.algorithms import ALGORITHMS
from paceline.algorithms.base import Algorithm
from paceline.algorithms.grpo import Grpo
from paceline.algorithms.sft import Sft
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


@pytest.mark.parametrize("algorithm", [Grpo(kl_coef=0.1, dual_clip=3.0), Sft()])
def test_every_metric_is_in_the_catalogue(algorithm: Algorithm) -> None:
    groups = random_rollout(np.random.default_rng(0))
    inputs = micro_batch(score_rollout(groups, algorithm, seed=0))
    names = [f"train/{name}" for name in algorithm.loss(inputs).means]
    names += algorithm.credit(groups, "policy").metrics
    assert [name for name in names if describe(name) is None] == []
