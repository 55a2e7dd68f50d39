"""The rules of the code base, as tests: import direction, sizes, what a run file may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "paceline"
FILES = sorted(PACKAGE.rglob("*.py"))

# Low to high. A part imports from lower levels and from itself; parts of one level do not meet.
LEVELS: list[set[str]] = [
    {"types", "errors"},
    {"deadline", "network", "observe", "user_code"},
    {"algorithms"},
    {"models", "weights"},
    {"engines", "trainers"},
    {"teachers"},
    {"rollout", "data", "testing"},
    {"cluster"},
    {"policy"},
    {"checkpoint", "checkpoint_settings", "evals", "evals_settings"},
    {"drivers"},
    {"control"},
    {"config"},
    {"explain", "build"},
    {"api"},
    {"cli", "__init__"},
    {"__main__"},
]
SAME_PART = [{"checkpoint", "checkpoint_settings"}, {"evals", "evals_settings"}]
LEVEL_OF = {part: level for level, parts in enumerate(LEVELS) for part in parts}
HEAVY = ("torch", "transformers", "ray", "sglang", "vllm", "megatron", "datasets", "pyarrow")
LAZY_IMPORTS_ALLOWED = {"build", "cli", "api", "__init__"}


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    stem = first.removesuffix(".py")
    return "cli" if stem.startswith("cli") else stem


def own_imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module == "paceline":
                for alias in node.names:
                    yield node, alias.name
            elif node.module.startswith("paceline."):
                yield node, node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("paceline."):
                    yield node, alias.name.split(".")[1]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(path)
    assert part in LEVEL_OF, f"{part} has no level: add it to LEVELS and to docs/structure.md"
    for node, target in own_imports(ast.parse(path.read_text())):
        if target == part or any({target, part} <= pair for pair in SAME_PART):
            continue
        assert LEVEL_OF[target] < LEVEL_OF[part], (
            f"{path.name}:{node.lineno}: {part} may not import {target}"
        )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_own_modules_are_imported_at_the_top(path: Path) -> None:
    if part_of(path) in LAZY_IMPORTS_ALLOWED:
        return
    tree = ast.parse(path.read_text())
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            found = [node.lineno for node, _ in own_imports(function)]
            assert not found, f"{path.name}:{found}: import inside {function.name}"


def test_no_relative_imports() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}:{node.lineno}"


def test_only_cluster_imports_ray() -> None:
    for path in FILES:
        if part_of(path) == "cluster":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(n.split(".")[0] == "ray" for n in names), f"{path}:{node.lineno}"


def test_file_sizes() -> None:
    sizes = {path: len(path.read_text().splitlines()) for path in FILES}
    too_long = {str(p.relative_to(PACKAGE)): n for p, n in sizes.items() if n > 450}
    assert not too_long
    tests = sorted(Path(__file__).parent.rglob("*.py"))
    assert not [path.name for path in tests if len(path.read_text().splitlines()) > 450]
    assert sum(n > 300 for n in sizes.values()) <= 0.15 * len(sizes)


def function_sizes() -> Iterator[tuple[str, int]]:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                yield f"{path.relative_to(PACKAGE)}:{node.name}", lines


def test_function_sizes() -> None:
    sizes = dict(function_sizes())
    assert not {name: n for name, n in sizes.items() if n > 90}
    assert sum(n > 40 for n in sizes.values()) <= 0.1 * len(sizes)


def test_drivers_are_short_and_have_no_try() -> None:
    for name in ("sync", "multi"):
        path = PACKAGE / "drivers" / f"{name}.py"
        tree = ast.parse(path.read_text())
        assert not [n for n in ast.walk(tree) if isinstance(n, ast.Try)], f"{name} has a try"
        assert len(path.read_text().splitlines()) < 80


def test_checking_a_run_file_loads_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "run.toml").write_text(
        '[run]\nname = "x"\nnum_steps = 1\n[model]\npath = "org/model"\n'
        '[data]\npath = "p.jsonl"\n[reward]\nkind = "exact"\n'
    )
    code = (
        "import sys; from paceline.config import load_run_file; "
        f"load_run_file({str(tmp_path / 'run.toml')!r}, []); "
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout.strip() == "[]", result.stderr


def test_seams_have_at_most_seven_methods() -> None:
    for seam in ("engines", "trainers", "teachers", "algorithms", "weights"):
        for node in ast.parse((PACKAGE / seam / "base.py").read_text()).body:
            is_protocol = isinstance(node, ast.ClassDef) and any(
                isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases
            )
            if is_protocol:
                methods = [
                    m
                    for m in node.body
                    if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)
                    and not m.decorator_list
                ]
                assert len(methods) <= 7, f"{seam}: {node.name} has {len(methods)} methods"


def test_names_that_say_nothing_are_not_used() -> None:
    banned = {"args", "utils", "misc", "helper", "helpers", "manager", "hub"}
    for path in FILES:
        assert path.stem not in banned, path
        assert not banned & set(path.relative_to(PACKAGE).parts), path


def test_every_folder_of_tests_is_run(pytestconfig: pytest.Config) -> None:
    """pytest skips folders of some names without a word, such as `build`."""
    skipped = pytestconfig.getini("norecursedirs")
    folders = {path.parent for path in Path(__file__).parent.rglob("test_*.py")}
    names = {part for path in folders for part in path.relative_to(Path(__file__).parent).parts}
    assert "build" in names
    assert not [name for name in names if any(fnmatch(name, pattern) for pattern in skipped)]
