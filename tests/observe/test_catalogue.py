from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.observe.catalogue import AREAS, CATALOGUE, describe, nearest, render_markdown

ROOT = Path(__file__).parent.parent.parent


def test_a_placeholder_stands_for_one_part_of_a_name() -> None:
    meaning = describe("time/collect_s")
    assert meaning is not None
    assert meaning.unit == "s"
    assert describe("time/step_s") == CATALOGUE["time/step_s"]
    assert describe("time/collect") is None
    assert describe("time/a/b_s") is None
    assert describe("xtime/collect_s") is None


def test_a_literal_name_goes_before_a_pattern() -> None:
    assert describe("time/step_s") is not describe("time/other_s")


def test_near_names_are_found() -> None:
    assert nearest("train/los")[0] == "train/loss"
    assert nearest("zzzzzz") == []


def test_every_entry_is_complete_and_in_order() -> None:
    """Case 84: each metric says what it is a mean over."""
    assert list(CATALOGUE) == sorted(CATALOGUE)
    for name, meaning in CATALOGUE.items():
        assert re.fullmatch(r"[a-z]+(/[\w<>]+)+", name), name
        assert name.split("/")[0] in AREAS, name
        assert meaning.text, name
        assert meaning.over, name


def test_the_page_has_every_name_once() -> None:
    page = render_markdown()
    for name in CATALOGUE:
        assert page.count(f"| `{name}` |") == 1
    assert "\n## train/\n" in page


def test_the_page_in_the_docs_is_current() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == render_markdown(), "run `python -m paceline.observe.catalogue`"


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline.observe.catalogue", str(tmp_path / "m.md")]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert (tmp_path / "m.md").read_text(encoding="utf-8") == render_markdown()


def names_in(text: str, areas: Sequence[str]) -> set[str]:
    """Metric names that a file writes as literals; a placeholder `{...}` is filled in."""
    found = set(re.findall(r"\.(?:mean|mean_of|sum|max|min|add)\(\s*f?\"([^\"]+/[^\"]+)\"", text))
    found |= {f"train/{name}" for name in re.findall(r"(?:means\[|\.part\()\"(\w+)\"", text)}
    filled = {
        name.replace("{area}", area)
        for name in found
        for area in areas
        if not {"{area}", "{name}"} <= set(re.findall(r"\{\w+\}", name))
    }
    return {re.sub(r"\{[^}]*\}", "x", name) for name in filled}


def test_names_in_the_code_are_described() -> None:
    found = {}
    for path in sorted((ROOT / "paceline").rglob("*.py")):
        if path.name != "testing.py" and path.name != "metrics.py":
            areas = ("eval/x",) if "evals" in path.parts else ("train", "critic")
            found |= dict.fromkeys(names_in(path.read_text(encoding="utf-8"), areas), path.name)
    for name, file in found.items():
        assert describe(name) is not None, f"{file} writes {name}: add it to CATALOGUE"
    assert len(found) > 20
    assert describe("nothing/of/this") is None
