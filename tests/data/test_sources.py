from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from paceline.data.sources import (
    DataConfig,
    FileSource,
    HuggingFaceSource,
    PythonSource,
    ReasoningGymSource,
    parse_slice,
)


def test_one_key_is_enough():
    config = DataConfig.model_validate({"path": "data/train.jsonl"})
    assert config.all_sources == (FileSource(path="data/train.jsonl"),)
    assert config.all_sources[0].label == "train"


def test_keys_of_the_short_form_reach_the_source():
    config = DataConfig(path="a.csv", prompt_key="question", answer_key="solution")
    assert config.all_sources == (
        FileSource(path="a.csv", prompt_key="question", answer_key="solution"),
    )


def test_no_source_is_allowed_here_and_seen_by_who_needs_one():
    assert DataConfig().all_sources == ()


def test_sources_of_all_kinds_by_kind_with_file_as_default():
    config = DataConfig.model_validate(
        {
            "sources": [
                {"path": "a.jsonl", "weight": 2},
                {"kind": "huggingface", "path": "org/gsm8k", "config": "main", "weight": 1.5},
                {"kind": "reasoning_gym", "task": "chain_sum", "weight": 1},
                {"kind": "python", "function": "rows.py:make", "weight": 1},
            ]
        }
    )
    kinds = [type(source) for source in config.all_sources]
    assert kinds == [FileSource, HuggingFaceSource, ReasoningGymSource, PythonSource]
    assert [s.label for s in config.all_sources] == ["a", "gsm8k", "chain_sum", "make"]


def test_a_resolved_config_reads_back_as_itself():
    config = DataConfig.model_validate(
        {"sources": [{"path": "a.jsonl"}, {"kind": "reasoning_gym", "task": "chain_sum"}]}
    )
    assert DataConfig.model_validate(config.model_dump(exclude_none=True)) == config


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"path": "a", "sources": [{"path": "b"}]}, "`path` and `sources` are both set"),
        ({"prompt_key": "q"}, "`prompt_key` belongs to `path`"),
        ({"path": "a", "system": "s", "template": "plain"}, "`system` needs chat messages"),
        ({"sources": [{"path": "x/a.csv"}, {"path": "y/a.csv"}]}, "two sources are named 'a'"),
        ({"sources": [{"path": "a", "weight": 1}, {"path": "b"}]}, "'b' has no weight"),
        ({"sources": [{"path": "a", "weight": 0}]}, "greater than 0"),
        ({"sources": [{"path": "a", "weight": float("inf")}]}, "finite"),
        ({"sources": [{"path": "a", "slice": "5"}]}, "'5' is not a slice"),
        ({"sources": [{"kind": "python", "function": "rows.py"}]}, "module:name"),
        ({"sources": [{"kind": "jsonl", "path": "a"}]}, "'jsonl'"),
        ({"sources": [{"kind": "reasoning_gym"}]}, "task"),
        ({"path": "a", "shuffle": "false"}, "valid boolean"),
        ({"path": "a", "max_prompt_tokens": 0}, "greater than 0"),
    ],
)
def test_wrong_blocks_are_refused_with_the_reason(block, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig.model_validate(block)


def test_contradictions_are_reported_together():
    with pytest.raises(ValidationError) as caught:
        DataConfig(answer_key="a", system="s", template="plain")
    assert "`answer_key` belongs" in str(caught.value)
    assert "`system` needs" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0:1000", slice(0, 1000)),
        ("[2:5]", slice(2, 5)),
        (":7", slice(None, 7)),
        ("-3:", slice(-3, None)),
        (" [ 1 : 2 ] ", slice(1, 2)),
    ],
)
def test_slices(text, expected):
    assert parse_slice(text) == expected


@pytest.mark.parametrize("text", ["", "3", "1:2:3", "a:b", "1-2"])
def test_other_texts_are_no_slices(text):
    with pytest.raises(ValueError, match="is not a slice"):
        parse_slice(text)


def test_data_modules_load_nothing_heavy():
    code = (
        "import sys, paceline.data.loader, paceline.data.stream\n"
        "print([m for m in ('torch', 'numpy', 'pyarrow', 'transformers', 'datasets', "
        "'reasoning_gym') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
