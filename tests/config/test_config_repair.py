"""Whatever stands in a run file, loading gives a RunFile or one ConfigError that names the keys."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_files import VALID

from paceline.config import RunFile, load_settings
from paceline.config.fields import keys_of
from paceline.errors import ConfigError

PATHS = sorted({key.path for key in keys_of(RunFile)})
WRONG = st.one_of(
    st.text(max_size=6),
    st.integers(-3, 3),
    st.floats(),
    st.booleans(),
    st.just([]),
    st.just({}),
    st.just([{}]),
    st.just([{"name": "a"}, 3]),
    st.just({"kind": "nothing"}),
    st.just("none"),
    st.just("1e-5"),
)


def put(tables: dict[str, Any], path: str, value: Any) -> None:
    """Set a key, making tables and one-item lists on the way; gives up where something else is."""
    node: Any = tables
    parts = path.split(".")
    for part in parts[:-1]:
        name = part.removesuffix("[]")
        if not isinstance(node, dict):
            return
        node = node.setdefault(name, [{}] if part.endswith("[]") else {})
        if isinstance(node, list) and node:
            node = node[0]
    if isinstance(node, dict):
        node[parts[-1].removesuffix("[]")] = value


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PATHS), WRONG), min_size=1, max_size=4))
def test_wrong_values_end_in_one_error(changes: list[tuple[str, Any]]) -> None:
    tables = tomllib.loads(VALID)
    for path, value in changes:
        # A copy, since hypothesis may give one list twice: it would be put into itself.
        put(tables, path, copy.deepcopy(value))
    before = copy.deepcopy(tables)
    with pytest.raises(ConfigError, match="settings: "):
        load_settings(tables, base="/nowhere")
    assert repr(tables) == repr(before)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(PATHS), st.text("abcdef_", min_size=1, max_size=8))
def test_unknown_keys_anywhere_are_named(path: str, name: str) -> None:
    tables = tomllib.loads(VALID)
    block = path.rpartition(".")[0]
    name = f"{name}_qq"
    put(tables, f"{block}.{name}" if block else name, 1)
    with pytest.raises(ConfigError, match=name):
        load_settings(tables, base="/nowhere")


def test_a_check_is_skipped_where_its_key_is_wrong(tmp_path: Path) -> None:
    settings = tomllib.loads(VALID) | {"rollout": {"samples_per_prompt": "1"}}
    with pytest.raises(ConfigError) as info:
        load_settings(settings, base=tmp_path, given=["prompts"])
    assert "compares the answers" not in str(info.value)
    assert "rollout.samples_per_prompt" in str(info.value)


def test_validators_of_a_block_run_beside_a_wrong_type(tmp_path: Path) -> None:
    settings = tomllib.loads(VALID) | {
        "algorithm": {"loss_mean": "constant", "clip_low": "x"},
    }
    with pytest.raises(ConfigError) as info:
        load_settings(settings, base=tmp_path)
    assert "needs constant_tokens" in str(info.value)
    assert "algorithm.clip_low" in str(info.value)


def test_a_validator_is_not_blamed_for_a_key_that_was_taken_out(tmp_path: Path) -> None:
    settings = tomllib.loads(VALID) | {
        "algorithm": {"loss_mean": "constant", "constant_tokens": "x"},
    }
    with pytest.raises(ConfigError) as info:
        load_settings(settings, base=tmp_path)
    assert "needs constant_tokens" not in str(info.value)
    assert "algorithm.constant_tokens" in str(info.value)
