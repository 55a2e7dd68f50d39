"""Walks the config classes: every key of a run file with its type, limits, default and meaning."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from paceline.types import Config

SIMPLE_WORDS: Mapping[Any, str] = {
    bool: "`true` or `false`",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
    Any: "any value",
}
PLURALS = {"whole number": "whole numbers", "number": "numbers", "text": "texts", "path": "paths"}
LIMITS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a run file.

    Example: Key(path="evals.sets[].limit", block="evals.sets[]", kind=None, ...); a key of a union
    such as `[algorithm]` names the `kind` that has it.
    """

    path: str
    block: str
    kind: str | None
    owner: type[Config]
    field: FieldInfo

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2].removesuffix("[]")

    @property
    def classes(self) -> list[type[Config]]:
        """Config classes that this key holds: a block, or the kinds of one."""
        return config_classes(self.field.annotation)

    @property
    def is_block(self) -> bool:
        return bool(self.classes)

    @property
    def allowed(self) -> str:
        return type_words(self.field.annotation, self.field.metadata)

    @property
    def default(self) -> str:
        return default_words(self.field)

    @property
    def doc(self) -> str:
        if self.name == "kind" and not self.field.description:
            return f"Selects this kind. {class_doc(self.owner)}"
        return " ".join((self.field.description or "").split())

    @property
    def plain_path(self) -> str:
        """Without the brackets of lists: `evals.sets.limit`."""
        return self.path.replace("[]", "")


def strip_annotation(annotation: Any) -> tuple[Any, list[Any]]:
    """The bare type, and the limits that `Annotated` put on it."""
    limits: list[Any] = []
    while get_origin(annotation) is Annotated:
        annotation, *extra = get_args(annotation)
        for item in extra:
            limits.extend(item.metadata if isinstance(item, FieldInfo) else [item])
    return annotation, limits


def alternatives(annotation: Any) -> list[Any]:
    """Members of a union, each still annotated; a plain type is its own only member."""
    bare, _ = strip_annotation(annotation)
    if get_origin(bare) in (Union, types.UnionType):
        return [member for part in get_args(bare) for member in alternatives(part)]
    return [annotation]


def is_nullable(annotation: Any) -> bool:
    return any(member is type(None) for member in alternatives(annotation))


def item_type(annotation: Any) -> Any | None:
    """What a list holds; None if the annotation is no list."""
    for member in alternatives(annotation):
        bare, _ = strip_annotation(member)
        if get_origin(bare) in (tuple, list, Sequence):
            return get_args(bare)[0]
    return None


def table_type(annotation: Any) -> Any | None:
    """What the values of a free table are; None if the annotation is no such table."""
    for member in alternatives(annotation):
        bare, _ = strip_annotation(member)
        if bare is dict or get_origin(bare) in (dict, Mapping):
            return (get_args(bare) or (str, Any))[1]
    return None


def config_classes(annotation: Any) -> list[type[Config]]:
    """Config classes in an annotation: directly, in a union, or as items of a list or table."""
    found: list[type[Config]] = []
    for member in alternatives(annotation):
        bare, _ = strip_annotation(member)
        if isinstance(bare, type) and issubclass(bare, Config):
            found.append(bare)
        elif item := (item_type(member) or table_type(member)):
            found.extend(config_classes(item))
    return found


def class_doc(cls: type[Config]) -> str:
    """The first paragraph of a config class's docstring, without the name of its block."""
    text = " ".join((cls.__doc__ or "").strip().partition("\n\n")[0].split())
    block, colon, meaning = text.partition(": ")
    return meaning[:1].upper() + meaning[1:] if colon and block.startswith("`") else text


def kind_of(cls: type[Config]) -> str | None:
    """The value of `kind` that selects this class in a union."""
    field = cls.model_fields.get("kind")
    values = get_args(field.annotation) if field is not None else ()
    return str(values[0]) if len(values) == 1 and isinstance(values[0], str) else None


def join_words(words: Sequence[str], last: str = "or") -> str:
    """a, b or c."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def type_words(annotation: Any, limits: Sequence[Any] = ()) -> str:
    """An annotation in words: `whole number >= 1`, `list of texts`, `one of `a`, `b``."""
    members = [m for m in alternatives(annotation) if m is not type(None)]
    words = list(dict.fromkeys(_member_words(m, limits) for m in members))
    return join_words(words)


def _member_words(annotation: Any, outer: Sequence[Any]) -> str:
    bare, limits = strip_annotation(annotation)
    limits = [*limits, *outer]
    origin = get_origin(bare)
    if origin is Literal:
        values = [
            f"`{str(v).lower()}`" if isinstance(v, bool) else f"`{v}`" for v in get_args(bare)
        ]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    if origin in (tuple, list, Sequence):
        return _list_words(get_args(bare), is_tuple=origin is tuple)
    if table_type(bare) is not None:
        value = type_words(table_type(bare))
        return "table" if value == "any value" else f"table of {PLURALS.get(value, value)} by name"
    if isinstance(bare, type) and issubclass(bare, Config):
        kind = kind_of(bare)
        return "table" if kind is None else f"table of kind `{kind}`"
    return SIMPLE_WORDS.get(bare, getattr(bare, "__name__", str(bare))) + _limit_words(limits)


def _list_words(items: tuple[Any, ...], *, is_tuple: bool) -> str:
    if is_tuple and Ellipsis not in items:
        return f"list of {len(items)}: {', '.join(type_words(item) for item in items)}"
    if config_classes(items[0]):
        return "list of tables"
    word = type_words(items[0])
    if word.startswith("one of "):
        return f"list of values among {word.removeprefix('one of ')}"
    for mark in (" >", ","):
        head, _, limit = word.partition(mark)
        if limit:
            return f"list of {PLURALS.get(head, head)}{mark}{limit}"
    return f"list of {PLURALS.get(word, word)}"


def _limit_words(limits: Sequence[Any]) -> str:
    found = [
        f"{sign} {getattr(limit, name):g}"
        for name, sign in LIMITS
        for limit in limits
        if isinstance(getattr(limit, name, None), int | float)
    ]
    words = f" {' and '.join(found)}" if found else ""
    for limit in limits:
        if pattern := getattr(limit, "pattern", None):
            words += f" of the form `{pattern}`"
        if (least := getattr(limit, "min_length", None)) is not None:
            words += ", not empty" if least == 1 else f", at least {least} long"
        if (most := getattr(limit, "max_length", None)) is not None:
            words += f", at most {most} long"
    return words


def default_words(field: FieldInfo) -> str:
    """The default as one would write it; `required` or `none` where there is nothing to write."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    return value_words(None if value is PydanticUndefined else value)


def value_words(value: Any) -> str:
    """A value as TOML shows it; `none` for an absent one."""
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case str():
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
        case Config():
            kind = getattr(value, "kind", None)
            return f"table of kind `{kind}`" if kind else "table of defaults"
        case Mapping():
            items = ", ".join(f"{k} = {value_words(v)}" for k, v in value.items())
            return f"{{{items}}}"
        case list() | tuple():
            return f"[{', '.join(value_words(v) for v in value)}]"
        case _:
            return str(value)


@cache
def keys_of(cls: type[Config], prefix: str = "") -> tuple[Key, ...]:
    """All keys of a class and of the blocks in it, in the order of the file."""
    return tuple(_walk(cls, prefix, ()))


def _walk(cls: type[Config], prefix: str, above: tuple[type[Config], ...]) -> Iterator[Key]:
    if cls in above:
        return
    for name, field in cls.model_fields.items():
        path = f"{prefix}.{name}" if prefix else name
        if item_type(field.annotation) is not None and config_classes(field.annotation):
            path += "[]"
        is_table = table_type(field.annotation) is not None and config_classes(field.annotation)
        if is_table:
            path += ".<name>"
        yield Key(path, prefix, kind_of(cls), cls, field)
        # What a named table holds besides its own keys are the blocks at the top.
        known = _block_classes(cls) if is_table else ()
        for child in config_classes(field.annotation):
            yield from _walk(child, path, (*above, cls, *known))


def _block_classes(cls: type[Config]) -> list[type[Config]]:
    """Config classes of the plain blocks of a class."""
    fields = [f for f in cls.model_fields.values() if table_type(f.annotation) is None]
    return [found for field in fields for found in config_classes(field.annotation)]
