"""From pydantic's errors to sentences: what was found, what is allowed, what to write."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from paceline.config.fields import (
    config_classes,
    is_nullable,
    item_type,
    join_words,
    keys_of,
    kind_of,
    table_type,
    type_words,
    value_words,
)
from paceline.config.names import SYNONYMS, nearest
from paceline.config.problems import KeyPath, Problem, dotted
from paceline.types import Config

TRUE_WORDS = {"true", "yes", "on", "1"}
FALSE_WORDS = {"false", "no", "off", "0"}
NONE_WORDS = {"none", "null", "nil", "~", ""}
LIMIT_ERRORS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}


def class_at(root: type[Config], tables: Any, path: KeyPath) -> type[Config] | None:
    """The config class of the table at `path`; where there are several, the one of its `kind`."""
    candidates: list[type[Config]] = [root]
    node = tables
    is_named = False
    for part in path:
        owner = _pick(candidates, node)
        node = _step(node, part)
        if isinstance(part, int):
            continue
        if is_named:  # a name that the user chose, not a key
            is_named = False
            continue
        if owner is None or part not in owner.model_fields:
            return None
        annotation = owner.model_fields[part].annotation
        is_named = table_type(annotation) is not None
        candidates = config_classes(annotation)
        if not candidates:
            return None
    return None if is_named else _pick(candidates, node)


def _pick(candidates: Sequence[type[Config]], node: Any) -> type[Config] | None:
    if len(candidates) == 1:
        return candidates[0]
    kind = node.get("kind") if isinstance(node, dict) else None
    if kind is None:
        return next(iter(candidates), None)
    return next((cls for cls in candidates if kind_of(cls) == kind), None)


def _step(node: Any, part: str | int) -> Any:
    if isinstance(node, dict):
        return node.get(str(part))
    is_item = isinstance(node, list | tuple) and isinstance(part, int) and part < len(node)
    return node[part] if is_item else None


def _step_all(tables: Any, path: KeyPath) -> Any:
    node = tables
    for part in path:
        node = _step(node, part)
    return node


def translate(
    error: ValidationError, root: type[Config], tables: Any, prefix: KeyPath = ()
) -> list[Problem]:
    """Every error of a validation, one problem a key.

    `tables`: the whole file. `prefix`: where in it the validated block stands.
    """
    found: dict[KeyPath, list[ErrorDetails]] = {}
    for item in error.errors(include_url=False):
        item["loc"] = (*prefix, *item["loc"])
        found.setdefault(_real_path(item, tables), []).append(item)
    return [
        Problem(path, _sentence(path, items, root, tables))
        for path, items in found.items()
        if not _is_shadowed(path, items, found)
    ]


def _is_shadowed(
    path: KeyPath, items: list[ErrorDetails], found: Mapping[KeyPath, list[ErrorDetails]]
) -> bool:
    """A failed alternative of a union (`text or table`) beside a better message further in."""
    is_type_error = all(item["type"].endswith("_type") for item in items)
    return is_type_error and any(
        len(other) > len(path) and other[: len(path)] == path for other in found
    )


def _real_path(item: ErrorDetails, tables: Any) -> KeyPath:
    """The location without the labels that pydantic adds for members of a union."""
    path: list[str | int] = []
    node = tables
    for number, part in enumerate(item["loc"]):
        is_last = number == len(item["loc"]) - 1
        is_key = (isinstance(node, dict) and part in node) or (
            isinstance(node, list | tuple) and isinstance(part, int)
        )
        is_absent = is_last and item["type"] == "missing" and isinstance(node, dict)
        if isinstance(part, int) and isinstance(node, list | tuple) and part >= len(node):
            break
        if is_key or is_absent:
            path.append(part)
            node = _step(node, part)
    return tuple(path)


def _sentence(path: KeyPath, items: list[ErrorDetails], root: type[Config], tables: Any) -> str:
    first = items[0]
    match first["type"]:
        case "extra_forbidden":
            return unknown_key(path, root, tables)
        case "missing" if first["loc"] and path and path[-1] == first["loc"][-1]:
            owner = class_at(root, tables, path[:-1])
            field = owner.model_fields.get(str(path[-1])) if owner else None
            allowed = type_words(field.annotation, field.metadata) if field else "a value"
            return f"missing; write {allowed}"
        case "union_tag_invalid" | "union_tag_not_found":
            return _wrong_kind(first)
        case "value_error":
            return str(first.get("ctx", {}).get("error", first["msg"]))
    return _wrong_value(path, items, root, tables)


def _wrong_kind(item: ErrorDetails) -> str:
    context = item.get("ctx", {})
    if item["type"] == "union_tag_not_found":
        return "missing `kind`" if isinstance(item["input"], dict) else "found no table"
    tags = [tag.strip().strip("'") for tag in context["expected_tags"].split(",")]
    near = nearest(str(context["tag"]), tags)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"found kind {context['tag']!r}, allowed: {join_words([repr(t) for t in tags])}{hint}"


def _wrong_value(path: KeyPath, items: list[ErrorDetails], root: type[Config], tables: Any) -> str:
    value = _step_all(tables, path)
    annotation, limits = _annotation_at(path, root, tables)
    if annotation is None:
        return f"found {_shown(value)}: {items[0]['msg']}"
    if isinstance(path[-1], int) and item_type(annotation) is not None:
        annotation = item_type(annotation)
    allowed = type_words(annotation, limits)
    hint = _hint(value, annotation, allowed, str(path[-1]))
    return f"found {_shown(value)}, allowed: {allowed}{hint}"


def _annotation_at(path: KeyPath, root: type[Config], tables: Any) -> tuple[Any, Sequence[Any]]:
    named = [number for number, part in enumerate(path) if isinstance(part, str)]
    for number in reversed(named):
        owner = class_at(root, tables, path[:number])
        field = owner.model_fields.get(str(path[number])) if owner else None
        if field is None:
            continue
        if number == len(path) - 1 or isinstance(path[number + 1], int):
            return field.annotation, field.metadata
        return table_type(field.annotation), ()
    return None, ()


def _shown(value: Any) -> str:
    """The value and, where it could be mistaken, its type."""
    shown = value_words(value)
    if len(shown) > 80:
        shown = f"{shown[:77]}..."
    match value:
        case str():
            return f"the text {shown}"
        case dict():
            return f"a table {shown}"
        case list() | tuple():
            return f"the list {shown}"
        case _ if callable(value):
            return f"the Python object {value!r}"
        case _:
            return shown


def _hint(value: Any, annotation: Any, allowed: str, name: str) -> str:
    """What to write instead, where the meaning is plain."""
    takes_number = "number" in allowed
    if "list of" in allowed and not isinstance(value, list | tuple | dict):
        return f"; write `{name} = [{value_words(value)}]`"
    if isinstance(value, str):
        word = value.strip().lower()
        if word in NONE_WORDS:
            end = "to have none" if is_nullable(annotation) else "to take the default"
            return f"; TOML has no {value or 'empty value'!s}: leave the key out {end}"
        if "`true`" in allowed and word in TRUE_WORDS | FALSE_WORDS:
            return f"; write `{name} = {str(word in TRUE_WORDS).lower()}` without quotes"
        if takes_number and _is_number(word):
            number = word if "whole" not in allowed else f"{float(word):g}"
            return f"; write `{name} = {number}` without quotes"
        near = nearest(value, [part.strip("`") for part in allowed.split() if "`" in part])
        if near:
            return f"; did you mean {near[0].strip('`,')!r}?"
    if isinstance(value, float) and "whole number" in allowed and value.is_integer():
        return f"; write `{name} = {int(value)}`"
    if allowed == "text" and isinstance(value, int | float):
        return f'; write `{name} = "{value_words(value)}"` (on a command line: {name}=\'"..."\')'
    return ""


def _is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word.replace("_", "")))
    except ValueError:
        return False


def unknown_key(path: KeyPath, root: type[Config], tables: Any) -> str:
    """Which name may have been meant: in this block, in another kind of it, in another block."""
    name = str(path[-1])
    owner = class_at(root, tables, path[:-1])
    names = list(owner.model_fields) if owner else []
    block = dotted(path[:-1])
    holds_blocks = owner is not None and all(
        config_classes(field.annotation) for field in owner.model_fields.values()
    )
    what = "unknown block or key" if holds_blocks else "unknown key"
    if other := _other_kind(path, root, name):
        kind = kind_of(owner) if owner else None
        return f"{what}: it belongs to kind {join_words(other)}, and {block}.kind is {kind!r}"
    if meant := SYNONYMS.get(name.lower()):
        return f"{what}; did you mean `{meant}`?"
    if near := nearest(name, names):
        return f"{what}; did you mean `{near[0]}`?"
    elsewhere = _elsewhere(name, root)
    if elsewhere:
        return f"{what}; did you mean {join_words([f'`{path}`' for path in elsewhere])}?"
    return f"{what}; allowed here: {', '.join(names)}" if names else what


def _other_kind(path: KeyPath, root: type[Config], name: str) -> list[str]:
    block = ".".join(str(p) for p in path[:-1] if not isinstance(p, int))
    kinds = [
        repr(key.kind)
        for key in keys_of(root)
        if key.plain_path.rpartition(".")[0] == block and key.kind and key.name == name
    ]
    return list(dict.fromkeys(kinds))


def _elsewhere(name: str, root: type[Config]) -> list[str]:
    """Keys of other blocks with this name, else with a similar one."""
    keys = [key for key in keys_of(root) if key.name != "kind"]
    exact = list(dict.fromkeys(key.plain_path for key in keys if key.name == name))
    if exact:
        return exact[:3]
    near = nearest(name, list(dict.fromkeys(key.name for key in keys)))
    return list(dict.fromkeys(key.plain_path for key in keys if key.name in near))[:3]


def not_numbers(tables: Any, path: KeyPath = ()) -> Iterator[Problem]:
    """Every `nan` in the tables: no key allows it, and every comparison with it is silent."""
    if isinstance(tables, float) and math.isnan(tables):
        yield Problem(path, "found nan; write a number")
    elif isinstance(tables, dict):
        for key, value in tables.items():
            yield from not_numbers(value, (*path, key))
    elif isinstance(tables, list | tuple):
        for index, value in enumerate(tables):
            yield from not_numbers(value, (*path, index))
