"""The table of algorithms, and what loading it may cost."""

import subprocess
import sys

import pytest

from paceline.algorithms import ALGORITHMS
from paceline.algorithms.base import Algorithm


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
