from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.data.loader import load_source
from paceline.data.sources import PythonSource
from paceline.errors import ConfigError, DataError

CODE = """
from dataclasses import dataclass
from paceline.types import Prompt

LISTED = ["x", {"prompt": "y", "answer": 1}]

@dataclass
class Task:
    text: str

def make():
    yield Task("a").text
    yield {"prompt": "b", "answer": 2}
    yield Prompt(id="c", text="c")

def endless():
    number = 0
    while True:
        yield f"number {number}"
        number += 1

def breaks():
    yield "a"
    raise LookupError("no more")

def leaves():
    import sys
    yield "a"
    sys.exit(0)

def text():
    return "abc"

number = 3
"""


@pytest.fixture(autouse=True)
def _same_modules(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def load(tmp_path: Path, function: str, **keys):
    (tmp_path / "rows.py").write_text(CODE)
    return load_source(PythonSource(function=function, **keys), base=tmp_path)


def test_functions_of_a_file(tmp_path):
    prompts = load(tmp_path, "rows.py:make")
    assert [p.text for p in prompts.prompts] == ["a", "b", "c"]
    assert prompts.name == "make"
    assert load(tmp_path, "rows.py:make").fingerprint == prompts.fingerprint


def test_functions_of_a_module_beside_the_run_file(tmp_path):
    assert len(load(tmp_path, "rows:make")) == 3


def test_an_iterable_needs_no_function(tmp_path):
    assert [p.text for p in load(tmp_path, "rows.py:LISTED").prompts] == ["x", "y"]


def test_a_slice_ends_an_endless_function(tmp_path):
    prompts = load(tmp_path, "rows.py:endless", slice="2:4")
    assert [p.text for p in prompts.prompts] == ["number 2", "number 3"]


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("rows.py:mkae", ConfigError, "rows.py has no 'mkae'; did you mean 'make'?"),
        ("row.py:make", ConfigError, "there is no file .*row.py; did you mean 'rows.py'?"),
        ("no_such_module_here:make", ConfigError, "write 'no_such_module_here.py:make'"),
        ("rows.py:breaks", DataError, "rows.py:breaks: LookupError: no more"),
        ("rows.py:leaves", DataError, r"rows.py:leaves: SystemExit: 0 \(.*rows.py:\d+ in leaves"),
        ("rows.py:text", DataError, "gave a str, not an iterable of rows"),
        ("rows.py:number", DataError, "gave a int, not an iterable of rows"),
    ],
)
def test_what_can_go_wrong(tmp_path, function, error, message):
    with pytest.raises(error, match=message):
        load(tmp_path, function)


def test_a_file_that_fails_to_import(tmp_path):
    (tmp_path / "bad.py").write_text("import no_such_package_here\n")
    with pytest.raises(DataError, match=r"bad.py can not be imported: .*no_such_package_here"):
        load_source(PythonSource(function="bad.py:make"), base=tmp_path)
    (tmp_path / "worse.py").write_text("1/0\n")
    with pytest.raises(DataError, match=r"worse.py can not be imported: ZeroDivisionError"):
        load_source(PythonSource(function="worse.py:make"), base=tmp_path)
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(DataError, match=r"leaves.py can not be imported: SystemExit: 0 \(.*py:2"):
        load_source(PythonSource(function="leaves.py:make"), base=tmp_path)


def test_ctrl_c_passes_through(tmp_path):
    (tmp_path / "stops.py").write_text("def make():\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_source(PythonSource(function="stops.py:make"), base=tmp_path)
