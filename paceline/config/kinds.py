"""What an override that chooses another kind of a block means for the file's keys in that block."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic.fields import FieldInfo

from paceline.config.blocks import RunFile
from paceline.config.problems import KeyPath
from paceline.config.source import Table, parse_override, plain
from paceline.config.translate import class_at


def leave_former_kinds(tables: Table, written: Table, overrides: Collection[str]) -> None:
    """Take out, in place, what the file says of the former kind and not of the chosen one.

    That is each key that the chosen kind has not, and each that stands at the former kind's default
    where the chosen one has another, as in a resolved file. What an override sets stays. written:
    the file as it was. overrides: those that could be read.
    """
    given = [parse_override(text) for text in overrides]
    paths = [path[:-1] for path, _ in given if path[-1] == "kind"]
    paths += [path for path, value in given if isinstance(value, dict) and "kind" in value]
    for path in dict.fromkeys(paths):
        former, chosen = class_at(RunFile, written, path), class_at(RunFile, tables, path)
        block = _table_at(tables, path)
        if former is None or chosen is None or former is chosen or block is None:
            continue
        for name in former.model_fields.keys() & block.keys() - _overridden(given, path):
            other = chosen.model_fields.get(name)
            if other is None or _was_default(block[name], former.model_fields[name], other):
                del block[name]


def _overridden(given: Collection[tuple[KeyPath, Any]], path: KeyPath) -> set[str]:
    """Keys of the block at `path` that overrides set."""
    size = len(path)
    found = {str(own[size]) for own, _ in given if own[:size] == path and len(own) > size}
    for own, value in given:
        if own == path and isinstance(value, dict):
            found |= value.keys()
    return found


def _was_default(value: Any, former: FieldInfo, chosen: FieldInfo) -> bool:
    default, other = (
        plain(field.get_default(call_default_factory=True, validated_data={}))
        for field in (former, chosen)
    )
    return bool(value == default and default != other)


def _table_at(tables: Table, path: KeyPath) -> dict[str, Any] | None:
    node: Any = tables
    for part in path:
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            return None
    return node if isinstance(node, dict) else None
