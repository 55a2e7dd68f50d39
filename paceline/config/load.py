"""Loading, checking and writing run files."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import ValidationError

from paceline.config.blocks import RunFile
from paceline.config.check_paths import PATH_CHECKS
from paceline.config.checks import CHECKS, Purpose, Situation
from paceline.config.fields import config_classes
from paceline.config.kinds import leave_former_kinds
from paceline.config.part_checks import PART_CHECKS
from paceline.config.policies import PolicyConfig, inherit_blocks
from paceline.config.policy_checks import check_all, written_where
from paceline.config.problems import KeyPath, Places, Problem, config_error
from paceline.config.repair import rest_of
from paceline.config.source import Table, apply_overrides, nested, plain, read_toml
from paceline.config.translate import not_numbers, translate
from paceline.types import Config

C = TypeVar("C", bound=Config)


def load_run_file(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    purpose: Purpose = "train",
    given: Collection[str] = (),
) -> RunFile:
    """Read a run file, apply the overrides in order, and check everything.

    `overrides`: `trainer.lr=1e-5`, `rollout.sampling.stop=["\\n"]`; values are TOML, bare words
    are texts, an empty value takes the key out. Where one chooses another `kind` of a block, the
    file's keys that only the former kind has, or that stood at its defaults, are left out.
    `given`: what Python code hands over besides the file: `prompts`, `reward`, `eval_prompts`.
    Raises one ConfigError with all that is wrong.
    """
    path = Path(path)
    tables, lines = read_toml(path)
    places = Places(path, lines)
    written = copy.deepcopy(tables)
    problems = apply_overrides(tables, overrides, places)
    leave_former_kinds(tables, written, places.overrides.values())
    folder = Path(os.path.abspath(path.parent))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._") or "run"
    return _assemble(tables, places, problems, folder, name, Situation(purpose, frozenset(given)))


def load_settings(
    settings: Mapping[str, Any],
    *,
    base: str | Path = ".",
    name: str = "run",
    purpose: Purpose = "train",
    given: Collection[str] = (),
) -> RunFile:
    """The same from Python: keys are dotted or blocks, values are what TOML would give.

    Example: load_settings({"model.path": "gpt2", "trainer": {"lr": 1e-5}, "run.num_steps": 10})
    None leaves a key out. Relative paths start from `base`.
    """
    tables: Table = plain(nested(settings))
    folder = Path(os.path.abspath(base))
    return _assemble(tables, Places(), [], folder, name, Situation(purpose, frozenset(given)))


def load_block(cls: type[C], values: Mapping[str, Any], name: str) -> C:
    """One block by itself, with the errors of a run file.

    Example: load_block(Sampling, {"temperature": 0}, "sampling")
    """
    tables = plain(values)
    try:
        return cls.model_validate(tables)
    except ValidationError as error:
        found = translate(error, cls, tables)
        problems = [Problem((name, *problem.path), problem.text) for problem in found]
        raise config_error(problems, Places()) from None


def _assemble(
    tables: Table,
    places: Places,
    problems: list[Problem],
    folder: Path,
    name: str,
    situation: Situation,
) -> RunFile:
    """Validate what is there, run every check that still can run, and raise all that is wrong."""
    run = tables.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", name)
        base = run.get("base", ".")
        if isinstance(base, str):
            run["base"] = os.path.normpath(folder / os.path.expanduser(base))
    written = copy.deepcopy(tables)
    _set_default_kinds(tables, RunFile)
    inherit_blocks(tables)
    _set_policy_kinds(tables)
    _name_roles(tables)
    _inherit_sampling(tables)
    wrong: tuple[KeyPath, ...] = ()
    try:
        run_file = RunFile.model_validate(tables)
    except ValidationError as error:
        found = translate(error, RunFile, tables)
        rest = rest_of(tables, found, RunFile)
        run_file = RunFile.model_construct(**rest.blocks)
        wrong = rest.wrong
        problems += written_where(found + rest.problems, written)
    problems += check_all(
        (*CHECKS, *PART_CHECKS, *PATH_CHECKS), run_file, wrong, situation, written
    )
    named = {problem.path for problem in problems}
    problems += [problem for problem in not_numbers(tables) if problem.path not in named]
    if problems:
        raise config_error(problems, places)
    if not run_file.policies and run_file.algorithm.critic is not None and run_file.critic is None:
        return run_file.model_copy(update={"critic": run_file.critic_settings})
    return run_file


def _set_policy_kinds(tables: Table) -> None:
    policies = tables.get("policies")
    for own in policies.values() if isinstance(policies, dict) else ():
        if isinstance(own, dict):
            _set_default_kinds(own, PolicyConfig)


def _name_roles(tables: Table) -> None:
    """`solver = "a"` is short for `solver = { policy = "a" }`."""
    roles = tables.get("roles")
    if not isinstance(roles, dict):
        return
    for role, played_by in roles.items():
        if isinstance(played_by, str):
            roles[role] = {"policy": played_by}


def _set_default_kinds(tables: Table, root: type[Config]) -> None:
    """A block of several kinds without `kind` is of its default kind."""
    for name, field in root.model_fields.items():
        block = tables.get(name)
        kind = getattr(
            field.get_default(call_default_factory=True, validated_data={}), "kind", None
        )
        if isinstance(block, dict) and kind and len(config_classes(field.annotation)) > 1:
            block.setdefault("kind", kind)


def _inherit_sampling(tables: Table) -> None:
    """An eval set that names some keys of its sampling takes the others from training."""
    rollout, evals = tables.get("rollout"), tables.get("evals")
    trained = rollout.get("sampling") if isinstance(rollout, dict) else None
    sets = evals.get("sets") if isinstance(evals, dict) else None
    if not isinstance(trained, dict) or not isinstance(sets, list):
        return
    for one in sets:
        if isinstance(one, dict) and isinstance(one.get("sampling"), dict):
            one["sampling"] = {**trained, **one["sampling"]}


def render_run_file(run_file: RunFile, *, folder: Path | None = None) -> str:
    """The resolved file as TOML, every default spelled out.

    With `folder`, the base is written relative to it, so that a project may be moved as a whole.
    """
    tables = run_file.model_dump(mode="python", exclude_none=True)
    if folder is not None:
        try:
            tables["run"]["base"] = os.path.relpath(run_file.base, os.path.abspath(folder))
        except ValueError:  # another drive
            tables["run"]["base"] = str(run_file.base)
    return tomli_w.dumps(tables)


def write_run_file(run_file: RunFile, path: str | Path) -> Path:
    """Write the resolved file; loading it gives an equal RunFile."""
    path = Path(path)
    path.write_text(render_run_file(run_file, folder=path.parent), encoding="utf-8")
    return path
