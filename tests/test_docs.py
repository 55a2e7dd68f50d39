"""The documentation is true: keys, run files, commands, links and messages that it shows exist."""

from __future__ import annotations

import ast
import asyncio
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from run_files import VALID, write_project

import paceline
from paceline.algorithms import ALGORITHMS
from paceline.cli.app import COMMANDS
from paceline.config import RunFile, load_settings
from paceline.config.fields import keys_of
from paceline.config.source import merge
from paceline.observe.catalogue import describe
from paceline.rollout.env import Reply
from paceline.rollout.settings import ScorerKind
from paceline.rollout.worker_protocol import REWARD_NAMES
from paceline.types import Message, Prompt

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
BLOCKS = tuple(RunFile.model_fields)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def fences(page: Path, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(page.read_text()) if kind == language]


def toml_blocks() -> Iterator[Any]:
    for page in PAGES:
        for number, body in enumerate(fences(page, "toml")):
            yield pytest.param(body, id=f"{page.name}-{number}")


@pytest.mark.parametrize("text", list(toml_blocks()))
def test_every_run_file_shown_is_valid(text: str, tmp_path: Path) -> None:
    """Parts of a run file are laid over a small valid one; the files they name are made."""
    shown = tomllib.loads(text)
    base: dict[str, Any] = {} if {"model", "run"} <= shown.keys() else tomllib.loads(VALID)
    if "sources" in shown.get("data", {}):
        base.pop("data", None)
    if "reward" in shown:
        base.pop("reward", None)
    write_project(tmp_path)
    for name in re.findall(r'"([\w./]+\.(?:jsonl|py|jinja))[":]', text):
        (tmp_path / name).touch()
    run_file = load_settings(merge(base, shown), base=tmp_path)
    assert run_file.run.num_steps is not None


def paths() -> set[str]:
    return {key.plain_path for key in keys_of(RunFile)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_named_exists(page: Path) -> None:
    words = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)\b(?!\()[^`]*`", page.read_text())
    keys = {word for word in words if word.partition(".")[0] in BLOCKS}
    files = {word for word in keys if word.endswith((".toml", ".json", ".jsonl"))}
    # `sampling.max_tokens` may stand for the key of the block that a table is about.
    assert keys - files <= paths()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_shown_exists(page: Path) -> None:
    names = {name for name, _, _ in COMMANDS}
    code = "\n".join([*fences(page, "bash"), *re.findall(r"`([^`\n]+)`", page.read_text())])
    shown = set(re.findall(r"(?:^|\s)paceline ([a-z-]+)", code, re.MULTILINE))
    assert shown <= names
    overrides = re.findall(r"\s([a-z_]+\.[a-z_.0-9]+)=", code)
    plain = {re.sub(r"\.\d+", "", key) for key in overrides}
    assert {key for key in plain if key.partition(".")[0] in BLOCKS} <= paths()
    functions = re.findall(r"paceline\.(\w+)\(", "\n".join(fences(page, "python")))
    assert set(functions) <= set(paceline.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_metric_named_exists(page: Path) -> None:
    if page.name == "metrics.md":
        return
    pattern = r"`((?:train|rollout|eval|time|perf)/[\w/<>]*[\w>])`"
    for name in re.findall(pattern, page.read_text()):
        assert describe(re.sub(r"<k>", "4", re.sub(r"<(set|name)>", "x", name))), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"`[^`\n]+`", "", FENCE.sub("", page.read_text()))
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_shown_is_python(page: Path) -> None:
    for body in fences(page, "python"):
        ast.parse(body)


@cache
def messages() -> str:
    """Every text constant of the package, one a line."""
    found = []
    for path in (ROOT / "paceline").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_every_message_to_look_up_is_one_that_is_printed() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    shown = [line.removeprefix("### `") for line in text.splitlines() if line.startswith("### `")]
    shown = [line.removesuffix("`") for line in shown if "/" not in line]
    assert len(shown) > 15
    for message in shown:
        for part in message.split("…"):
            assert part.strip() in messages(), message


def test_core_dependencies_are_all_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "docs" / "dependencies.md").read_text()
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    for requirement in (item for group in groups for item in group):
        name = re.split(r"[>=<\[]", requirement)[0]
        assert name in text, name


def first_column(page: str) -> list[str]:
    """Names in backticks at the start of the rows of all tables of a page."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"^\| `(\w+)`(?: \(default\))? \|", text, re.MULTILINE)


def test_the_tables_of_rewards_are_complete() -> None:
    assert set(first_column("rewards.md")) == {*REWARD_NAMES, *get_args(ScorerKind)}


def test_the_tables_of_algorithms_are_complete() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text()
    assert set(ALGORITHMS) <= set(first_column("algorithms.md"))
    for kind, make in ALGORITHMS.items():
        for name in make.model_fields:
            assert f"`{name}`" in text or name == "kind", f"{kind}: {name}"


def test_the_environment_shown_plays() -> None:
    """With an actor that gets it right at the second turn."""
    scope: dict[str, Any] = {}
    exec(fences(ROOT / "docs" / "environments.md", "python")[0], scope)
    asked: list[list[Message]] = []

    async def actor(messages: list[Message]) -> Reply:
        asked.append(list(messages))
        return Reply(str(len(asked)), "stop", 1)

    outcome = asyncio.run(
        scope["play"](Prompt("p", text="Hint: even.", answer="2"), {"policy": actor})
    )
    assert outcome.rewards == {"policy": 0.5}
    assert outcome.metrics == {"turns": 2}
    assert asked[1][:1] == asked[0]
    assert [message["role"] for message in asked[1]] == ["user", "assistant", "user"]
