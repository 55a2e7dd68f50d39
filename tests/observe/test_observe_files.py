from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from crashing import Crash, CrashingFiles

from paceline.observe.files import as_number, encode_json, write_atomically


@pytest.mark.parametrize("half_done", [False, True])
@pytest.mark.parametrize("at", range(4))
def test_a_crash_leaves_the_old_file_or_the_new_one(
    at: int, half_done: bool, tmp_path: Path
) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"old")
    with pytest.raises(Crash):
        write_atomically(path, b"the new one", CrashingFiles(at, half_done=half_done))
    assert path.read_bytes() == (b"the new one" if (at, half_done) > (2, False) else b"old")


class FailingRename(CrashingFiles):
    def rename(self, old: Path, new: Path) -> None:
        raise PermissionError(13, "Permission denied")


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(PermissionError):
        write_atomically(tmp_path / "x", b"new", FailingRename())
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x", b"old")]


def test_numbers_that_json_does_not_know_come_back() -> None:
    values = [1.5, math.inf, -math.inf, math.nan, 3]
    decoded = json.loads(encode_json({"x": values}))["x"]
    assert decoded == [1.5, "Infinity", "-Infinity", "NaN", 3]
    assert [as_number(item) for item in decoded][:3] == values[:3]
    assert math.isnan(as_number(decoded[3]) or 0.0)
    assert as_number(True) is as_number("x") is as_number(None) is None


def test_a_lone_surrogate_is_escaped_and_other_text_is_not() -> None:
    assert encode_json("ü") == b'"\xc3\xbc"\n'
    assert encode_json("ü\ud800") == b'"\\u00fc\\ud800"\n'
    assert json.loads(encode_json("ü\ud800")) == "ü\ud800"
