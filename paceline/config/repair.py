"""What is left of a wrong run file: the keys that are right, so that checks across them still run.

Wrong keys are taken out and the rest is validated again. That brings up what the validators of a
block find, which do not run while a key of the block has a wrong type.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from paceline.config.fields import table_type
from paceline.config.problems import KeyPath, Problem
from paceline.config.source import Table
from paceline.config.translate import class_at, translate
from paceline.types import Config


@dataclass(frozen=True, slots=True)
class Rest:
    """The blocks that are valid without the wrong keys, and which keys those are."""

    blocks: dict[str, Any]
    wrong: tuple[KeyPath, ...]
    problems: list[Problem]
    """Found only once the wrong keys were gone."""


def rest_of(tables: Table, problems: list[Problem], root: type[Config]) -> Rest:
    """Take out the keys of the problems and validate what stays, block by block."""
    repaired = copy.deepcopy(tables)
    paths = [problem.path for problem in problems if not _is_block(problem.path, tables)]
    wrong = [touched for path in paths for touched in _touched(path, tables, root)]
    removed = [gone for path in paths if (gone := _remove(repaired, path))]
    blocks: dict[str, Any] = {}
    found: list[Problem] = []
    for name, field in root.model_fields.items():
        if name not in repaired:
            if field.is_required() or any(path[0] == name for path in removed):
                wrong.append((name,))
            continue
        try:
            blocks[name] = _validate(field, repaired[name])
        except ValidationError as error:
            block_problems = translate(error, root, repaired, (name,))
            if table_type(field.annotation) is not None:
                blocks[name] = _by_names(field, repaired[name], name, wrong)
                found += _new(block_problems, name, removed)
                continue
            found += _new(block_problems, name, removed)
            blocks[name] = _by_fields(class_at(root, repaired, (name,)), repaired, name, wrong)
    return Rest(blocks, (*wrong, *removed), found)


def _is_block(path: KeyPath, tables: Table) -> bool:
    """True for what the validator of a block says: its keys are right one by one."""
    return len(path) == 1 and isinstance(tables.get(str(path[0])), dict)


def _validate(field: FieldInfo, value: Any) -> Any:
    annotated: Any = Annotated[field.annotation, field]
    adapter: TypeAdapter[Any] = TypeAdapter(annotated)
    return adapter.validate_python(value)


def _by_names(field: FieldInfo, tables: Any, name: str, wrong: list[KeyPath]) -> dict[str, Any]:
    """Of a table of blocks by name, those that are valid."""
    kept: dict[str, Any] = {}
    for key, table in tables.items() if isinstance(tables, dict) else ():
        try:
            kept |= _validate(field, {key: table})
        except ValidationError:
            wrong.append((name, key))
    return kept


def _by_fields(
    owner: type[Config] | None, tables: Table, name: str, wrong: list[KeyPath]
) -> Config | None:
    """The block without its own validators: each key that is right, defaults for the others."""
    if owner is None or not isinstance(tables[name], dict):
        wrong.append((name,))
        return None
    values: dict[str, Any] = {}
    for key, field in owner.model_fields.items():
        if key not in tables[name]:
            wrong += [(name, key)] if field.is_required() else []
            continue
        try:
            values[key] = _validate(field, tables[name][key])
        except ValidationError:
            wrong.append((name, key))
    return owner.model_construct(**values)


def _new(problems: list[Problem], block: str, removed: list[KeyPath]) -> list[Problem]:
    """Leave out what may be due to the keys that were taken out of the block: what names one."""
    names = {str(path[-1]) for path in removed if path[0] == block}
    words = [re.compile(rf"\b{re.escape(name)}\b") for name in names if len(name) > 2]
    return [
        problem
        for problem in problems
        if not names & set(map(str, problem.path))
        and not any(word.search(problem.text) for word in words)
    ]


def _touched(path: KeyPath, tables: Table, root: type[Config]) -> list[KeyPath]:
    """The key itself; an unknown one may be meant for any absent key of its block."""
    owner = class_at(root, tables, path[:-1])
    if not path or owner is None or path[-1] in owner.model_fields:
        return [path]
    node: Any = tables
    for part in path[:-1]:
        node = node[part]
    absent = [name for name in owner.model_fields if name not in node]
    return [path, *((*path[:-1], name) for name in absent)]


def _remove(tables: Table, path: KeyPath) -> KeyPath | None:
    """Take out the key, or the nearest one around it where it is absent or an item of a list."""
    for length in range(len(path), 0, -1):
        node: Any = tables
        for part in path[: length - 1]:
            is_there = (isinstance(node, dict) and part in node) or (
                isinstance(node, list) and isinstance(part, int) and part < len(node)
            )
            node = node[part] if is_there else None
        if isinstance(node, dict) and path[length - 1] in node:
            del node[path[length - 1]]
            return path[:length]
    return None
