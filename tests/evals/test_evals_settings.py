"""`[evals]`: what is accepted and what is refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from paceline.evals_settings import EvalsConfig, EvalSet

HELDOUT: dict[str, Any] = {"name": "heldout", "data": {"path": "heldout.jsonl"}}


def test_a_block_as_it_comes_from_a_run_file() -> None:
    sets = [HELDOUT | {"samples_per_prompt": 4, "pass_at": [1, 4], "sampling": {"top_p": 0.9}}]
    config = EvalsConfig.model_validate({"every": 5, "sets": sets})
    assert config.sets[0].pass_at == (1, 4)
    assert config.sets[0].sampling is not None
    assert config.sets[0].sampling.top_p == 0.9
    assert config.before_training
    assert EvalsConfig.model_validate_json(config.model_dump_json()) == config


def test_by_default_nothing_is_measured() -> None:
    assert EvalsConfig().every is None
    assert EvalsConfig().sets == ()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"samples_per_prompt": 4, "pass_at": [5]}, r"pass_at = 5.*samples_per_prompt = 4"),
        ({"pass_at": [0]}, r"pass_at = 0"),
        ({"samples_per_prompt": 4, "pass_at": [2, 2]}, r"twice"),
        ({"samples_per_prompt": 4, "sampling": {"temperature": 0}}, r"temperature"),
        ({"name": "held out"}, r"name"),
        ({"limit": 0}, r"limit"),
        ({"pass_threshold": float("nan")}, r"pass_threshold"),
        ({"samples": 3}, r"samples"),
    ],
)
def test_wrong_sets_are_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EvalSet.model_validate(HELDOUT | extra)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sets": [HELDOUT, HELDOUT]}, r"two eval sets are named 'heldout'"),
        ({"every": 0, "sets": [HELDOUT]}, r"every"),
        ({"on_busy": "drop"}, r"on_busy"),
        ({"background": "false"}, r"background"),
    ],
)
def test_wrong_blocks_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EvalsConfig.model_validate(config)


def test_every_field_is_documented() -> None:
    for block in (EvalsConfig, EvalSet):
        assert [n for n, f in block.model_fields.items() if not f.description] == []
