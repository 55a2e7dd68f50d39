from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.rollout.worker_protocol import REWARD_NAMES
from paceline.user_code import (
    find_problem,
    load_callable,
    load_object,
    read_signature,
    split_location,
)

SOURCE = """
import functools
import companion

LIMIT = 3

def score(completion, answer, *, strict=False):
    return float(completion == answer)

def wrong(completion, anwser):
    return 0.0

class Judge:
    def __call__(self, completion):
        return companion.VALUE

partial = functools.partial(score, strict=True)

if LIMIT:
    def chosen(completion):
        return 1.0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "companion.py").write_text("VALUE = 0.5\n")
    (tmp_path / "broken.py").write_text("def score(:\n")
    return tmp_path


@pytest.fixture(autouse=True)
def restore_imports(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_file_is_imported_by_its_path_with_its_folder(folder: Path) -> None:
    assert load_callable("mine.py:score", folder)("a", "a") == 1.0
    assert load_callable("mine.py:Judge", folder)("a") == 0.5


def test_files_of_one_name_do_not_meet(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.py").write_text("def score(completion): return 7.0\n")
    assert load_callable("mine.py:score", folder)("a", "b") == 0.0
    assert load_callable("mine.py:score", other)("a") == 7.0


def test_a_module_of_the_folder(folder: Path) -> None:
    assert load_callable("math:sqrt", folder)(4) == 2.0
    with pytest.raises(ConfigError, match=r"write 'no_such/module.py:f', relative to"):
        load_callable("no_such.module:f", folder)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("mine.py:scor", "did you mean 'score'"),
        ("qqq.py:score", "there is no file .*; there is 'broken.py', "),
        ("mien.py:score", "there is no file .*; did you mean 'mine.py'?"),
        ("mine.py", "not of the form"),
        ("mine.py:LIMIT", "not a function"),
    ],
)
def test_what_can_not_be_loaded_is_named(folder: Path, location: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_callable(location, folder)


def test_a_file_is_run_once_until_it_is_edited(folder: Path) -> None:
    path = folder / "counted.py"
    path.write_text("import companion\ncompanion.VALUE += 1\nlimit = 1\n")
    assert load_object("counted.py:limit", folder) == load_object("counted.py:limit", folder) == 1
    assert load_object("companion:VALUE", folder) == 1.5
    path.write_text("limit = 2\n")
    assert load_object("counted.py:limit", folder) == 2


def test_errors_of_the_users_file_pass_through_and_leave_no_module(folder: Path) -> None:
    (folder / "raises.py").write_text("1 / 0\n")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            load_callable("raises.py:f", folder)


@pytest.mark.parametrize(
    ("location", "problem"),
    [
        ("mine.py:score", None),
        ("mine.py:Judge", None),
        ("mine.py:partial", None),
        ("mine.py:chosen", None),
        ("json:dumps", None),
        ("mine.py:wrong", "asks for 'anwser'; did you mean 'answer'?"),
        ("mine.py:scor", "did you mean 'score'"),
        ("absent.py:f", "there is no file"),
        ("broken.py:score", "not valid Python"),
        ("mine", "not of the form"),
    ],
)
def test_problems_are_found_without_running_anything(
    folder: Path, location: str, problem: str | None
) -> None:
    found = find_problem(location, folder, REWARD_NAMES)
    assert (found is None) if problem is None else (found is not None and problem in found)
    assert "companion" not in sys.modules


def test_locations_are_split_at_the_last_colon() -> None:
    assert split_location("a/b.py:f") == ("a/b.py", "f")
    with pytest.raises(ConfigError, match="not of the form"):
        split_location("a.py:f()")


def call(function: Callable[..., Any], values: dict[str, Any]) -> Any:
    positional, keywords = read_signature(function, values, "f").bind(values)
    return function(*positional, **keywords)


def test_functions_get_what_they_declare() -> None:
    values = {"completion": "c", "answer": "a", "finish": "stop"}
    assert call(lambda completion: completion, values) == "c"
    assert call(lambda answer, completion: (answer, completion), values) == ("a", "c")
    assert call(lambda finish, **rest: (finish, rest), values) == (
        "stop",
        {"completion": "c", "answer": "a"},
    )
    assert call(lambda completion, other=5: other, values) == 5

    def positional(answer: str, /, *, completion: str) -> str:
        return answer + completion

    assert call(positional, values) == "ac"


def test_an_unknown_parameter_is_refused_with_the_allowed_names() -> None:
    with pytest.raises(ConfigError, match=r"'solution'.* it may declare completion, prompt"):
        read_signature(lambda solution: 0, REWARD_NAMES, "score")
