from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.problems import Places
from paceline.config.source import (
    apply_overrides,
    key_lines,
    merge,
    parse_override,
    read_toml,
)
from paceline.errors import ConfigError

TEXT = '''\
# a comment with [brackets] = and "quotes"
[run]
name = "a # b"
seed = 3   # after
[trainer]
"lr" = 1e-5
betas = [
    0.9,
    0.95,
]
[rollout.sampling]
stop = ["]", """
[not.a.header]
key = 1
"""]
max_tokens = 5
[[evals.sets]]
name = "one"
data = { path = "x.jsonl", kind = "file" }
[[evals.sets]]
name = "two"
[evals.sets.data]
path = "y"
[reward]
a.b.c = 1
'''


def test_lines_of_keys() -> None:
    lines = key_lines(TEXT)
    assert lines["run",] == 2
    assert lines["run", "name"] == 3
    assert lines["run", "seed"] == 4
    assert lines["trainer", "lr"] == 6
    assert lines["trainer", "betas"] == 7
    assert lines["rollout", "sampling"] == 11
    assert lines["rollout", "sampling", "stop"] == 12
    assert lines["rollout", "sampling", "max_tokens"] == 16
    assert lines["evals", "sets", 0, "name"] == 18
    assert lines["evals", "sets", 0, "data"] == 19
    assert lines["evals", "sets", 1, "name"] == 21
    assert lines["evals", "sets", 1, "data", "path"] == 23
    assert lines["reward", "a", "b", "c"] == 25
    assert not any("not" in path for path in lines)


def test_crlf_lines_are_counted_the_same() -> None:
    assert key_lines(TEXT.replace("\n", "\r\n")) == key_lines(TEXT)


values = st.recursive(
    st.none().map(lambda _: True) | st.integers(-9, 9) | st.floats(0, 1) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=5), values, max_size=4))
def test_every_key_of_generated_toml_has_its_line(tables: dict[str, Any]) -> None:
    text = tomli_w.dumps(tables)
    lines = key_lines(text)
    parsed = tomllib.loads(text)
    count = text.count("\n") + 1
    for key in parsed:
        if all(c not in key for c in '"\\') and key.isprintable():
            found = [path for path in lines if path[0] == key]
            assert found, (key, lines)
            assert all(1 <= lines[path] <= count for path in found)


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("trainer.lr=1e-5", ("trainer", "lr"), 1e-5),
        ("run.seed = 7", ("run", "seed"), 7),
        ("run.name=my-run", ("run", "name"), "my-run"),
        ("run.name=007", ("run", "name"), "007"),
        ("run.name=2024-01-02", ("run", "name"), "2024-01-02"),
        ('run.name="3"', ("run", "name"), "3"),
        ("observe.tensorboard=true", ("observe", "tensorboard"), True),
        ('rollout.sampling.stop=["\\n"]', ("rollout", "sampling", "stop"), ["\n"]),
        ("rollout.sampling={temperature = 0.5}", ("rollout", "sampling"), {"temperature": 0.5}),
        ("evals.sets.0.limit=5", ("evals", "sets", 0, "limit"), 5),
        ("reward.pattern=a=b", ("reward", "pattern"), "a=b"),
        ("reward.pattern=x # y", ("reward", "pattern"), "x # y"),
        ("reward.pattern=1, 2", ("reward", "pattern"), "1, 2"),
        ("trainer.max_grad_norm=inf", ("trainer", "max_grad_norm"), float("inf")),
        ("trainer.threads=", ("trainer", "threads"), None),
    ],
)
def test_override_values(text: str, path: tuple[str | int, ...], value: object) -> None:
    assert parse_override(text) == (path, value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("trainer.lr", "write it as key=value"),
        ("=3", "write it as key=value"),
        ("a..b=3", "write it as key=value"),
        ("run.name=[a, b]", "need quotes"),
        ('run.name="x', "no valid TOML"),
    ],
)
def test_override_errors(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_override(text)


def test_overrides_merge_set_and_remove_in_order() -> None:
    tables: dict[str, Any] = {
        "a": {"x": 1, "y": {"z": 1}},
        "list": [{"n": 1}, {"n": 2}],
    }
    places = Places()
    problems = apply_overrides(
        tables,
        ["a.y={w = 2}", "a.x=", "list.1.n=5", "b.c.d=true", "a.y.z=9", "a.y.z=10"],
        places,
    )
    assert problems == []
    assert tables == {
        "a": {"y": {"z": 10, "w": 2}},
        "list": [{"n": 1}, {"n": 5}],
        "b": {"c": {"d": True}},
    }
    assert places.describe(("a", "y", "z")) == "override a.y.z=10"


def test_overrides_that_lead_nowhere_are_problems() -> None:
    tables: dict[str, Any] = {"a": 3, "list": [{}]}
    problems = apply_overrides(tables, ["a.b=1", "list.4.n=1", "list.4=1"], Places())
    assert [problem.text for problem in problems] == [
        "a is 3, not a table",
        "there is no item list[4]",
        "the list has 1 items, numbered from 0",
    ]


def test_merge_leaves_its_inputs_alone() -> None:
    base, top = {"a": {"x": 1}}, {"a": {"y": 2}, "b": 3}
    assert merge(base, top) == {"a": {"x": 1, "y": 2}, "b": 3}
    assert base == {"a": {"x": 1}}


@pytest.mark.parametrize(
    ("raw", "place"),
    [
        (b'[run]\nname = "x\n', "run.toml:2:10: not valid TOML"),
        (b"[run]\na = 1\na = 2\n", "run.toml:3:6: not valid TOML"),
        (b"[run]\na = [1,\n", "run.toml:3:1: not valid TOML"),
        (b"[run]\nname = '\xff'\n", "run.toml:2: not valid UTF-8"),
    ],
)
def test_syntax_errors_name_file_line_and_column(tmp_path: Path, raw: bytes, place: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as info:
        read_toml(path)
    assert place in str(info.value)


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf[run]\r\nseed = 1\r\n")
    tables, lines = read_toml(path)
    assert tables == {"run": {"seed": 1}}
    assert lines["run", "seed"] == 2


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run file"):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(ConfigError, match=r"is a folder.*did you mean .*run\.toml"):
        read_toml(tmp_path)
