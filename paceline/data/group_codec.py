"""Groups as JSON values, exactly, so that finished work outlives the process.

    Group <-> {"prompt": {...}, "episodes": [{..., "samples": [{"tokens": "5 6 7 2", ...}]}], ...}

What is written follows the fields of the dataclasses, so a new field needs nothing here. A column
of numbers is one text: short in a file, and a number that is not finite needs no JSON of its own.
Values of any type, such as metadata, keep what JSON would lose, under keys that begin with `$`.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, NamedTuple, cast

from paceline.errors import CheckpointError
from paceline.types import Group, JsonValue, Sample

ESCAPE = "$"
"""First character of the keys that stand for what JSON has no word for."""


def encode_group(group: Group) -> JsonValue:
    """JSON values without NaN, infinity or anything else that a strict parser refuses.

    Raises:
        CheckpointError: if metadata or an answer holds what is no JSON value.
    """
    return _codec(Group).encode(group, "group")


def decode_group(value: JsonValue, where: str = "group") -> Group:
    """What `encode_group` was given.

    Raises:
        CheckpointError: if the value is damaged; it names the place, beginning with `where`.
    """
    return cast(Group, _codec(Group).decode(value, where))


class _Codec(NamedTuple):
    """Both directions for one type; the second argument is the place, for messages."""

    encode: Callable[[Any, str], JsonValue]
    decode: Callable[[Any, str], Any]


@cache
def _codec(kind: Any) -> _Codec:
    origin, parameters = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return _of_dataclass(cast(type, kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _of_enum(kind)
    if origin in (typing.Union, types.UnionType) and type(None) in parameters:
        (inner,) = (p for p in parameters if p is not type(None))
        return _of_optional(_codec(inner))
    if origin is list and parameters[0] in _COLUMNS:
        return _of_column(parameters[0])
    if origin is list or (origin is tuple and parameters[1:] == (...,)):
        return _of_items(origin, _codec(parameters[0]))
    if origin is dict and parameters[0] is str:
        return _of_table(_codec(parameters[1]))
    if kind is float:
        return _Codec(_encode_float, _decode_float)
    if kind in (int, str, bool):
        return _Codec(_same, lambda value, where: _checked(value, kind, where))
    if kind is Any:
        return _Codec(_encode_any, _decode_any)
    if typing.is_typeddict(kind) or origin in (Mapping, dict):
        return _Codec(_encode_any, lambda v, where: _checked(_decode_any(v, where), dict, where))
    raise TypeError(f"no JSON form is known for {kind!r}")


def _of_dataclass(kind: type) -> _Codec:
    hints = typing.get_type_hints(kind)
    codecs = {f.name: _codec(hints[f.name]) for f in fields(kind) if f.init}

    def encode(value: Any, where: str) -> JsonValue:
        return {n: c.encode(getattr(value, n), f"{where}.{n}") for n, c in codecs.items()}

    def decode(value: Any, where: str) -> Any:
        _checked(value, dict, where)
        if value.keys() != codecs.keys():
            missing, unknown = codecs.keys() - value.keys(), value.keys() - codecs.keys()
            raise _damage(where, f"lacks {sorted(missing)}, has unknown {sorted(unknown)}")
        made = kind(**{n: c.decode(value[n], f"{where}.{n}") for n, c in codecs.items()})
        if isinstance(made, Sample):
            _check_lengths(made, where)
        return made

    return _Codec(encode, decode)


def _of_enum(kind: type[Enum]) -> _Codec:
    def decode(value: Any, where: str) -> Enum:
        try:
            return kind(value)
        except ValueError:
            raise _damage(where, f"is {value!r}, no {kind.__name__}") from None

    return _Codec(lambda value, where: value.value, decode)


def _of_optional(inner: _Codec) -> _Codec:
    return _Codec(
        lambda value, where: None if value is None else inner.encode(value, where),
        lambda value, where: None if value is None else inner.decode(value, where),
    )


def _of_items(kind: type, inner: _Codec) -> _Codec:
    def encode(value: Any, where: str) -> JsonValue:
        return [inner.encode(item, f"{where}[{i}]") for i, item in enumerate(value)]

    def decode(value: Any, where: str) -> Any:
        _checked(value, list, where)
        return kind(inner.decode(item, f"{where}[{i}]") for i, item in enumerate(value))

    return _Codec(encode, decode)


def _of_table(inner: _Codec) -> _Codec:
    def encode(value: Any, where: str) -> JsonValue:
        return {key: inner.encode(item, f"{where}.{key}") for key, item in value.items()}

    def decode(value: Any, where: str) -> Any:
        _checked(value, dict, where)
        return {key: inner.decode(item, f"{where}.{key}") for key, item in value.items()}

    return _Codec(encode, decode)


def _read_bool(word: str) -> bool:
    return {"0": False, "1": True}[word]


_COLUMNS: dict[Any, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    int: (lambda x: str(int(x)), int),
    float: (lambda x: repr(float(x)), float),
    bool: (lambda x: "1" if x else "0", _read_bool),
}


def _of_column(kind: Any) -> _Codec:
    write, read = _COLUMNS[kind]

    def decode(value: Any, where: str) -> list[Any]:
        _checked(value, str, where)
        try:
            return [read(word) for word in value.split()]
        except (ValueError, KeyError) as error:
            raise _damage(where, f"is no column of {kind.__name__}: {error}") from None

    return _Codec(lambda value, where: " ".join(map(write, value)), decode)


def _same(value: Any, where: str) -> JsonValue:
    return value


def _encode_float(value: Any, where: str) -> JsonValue:
    return value if math.isfinite(value) else repr(float(value))


def _decode_float(value: Any, where: str) -> float:
    if value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _damage(where, f"is {value!r}, no number")
    return value


def _encode_any(value: Any, where: str) -> JsonValue:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"$float": repr(value)}
        case list():
            return [_encode_any(item, f"{where}[{i}]") for i, item in enumerate(value)]
        case tuple():
            return {"$tuple": _encode_any(list(value), where)}
        case Mapping() if all(isinstance(k, str) and not k.startswith(ESCAPE) for k in value):
            return {key: _encode_any(item, f"{where}.{key}") for key, item in value.items()}
        case Mapping():
            return {"$dict": [_encode_any([k, v], f"{where}.{k}") for k, v in value.items()]}
    raise CheckpointError(
        f"{where} is of type {type(value).__name__}, which is no JSON value, so a prompt in the "
        "buffer can not be saved: convert it where the prompts are made"
    )


def _decode_any(value: Any, where: str) -> Any:
    match value:
        case list():
            return [_decode_any(item, f"{where}[{i}]") for i, item in enumerate(value)]
        case {"$float": "nan" | "inf" | "-inf" as word, **rest} if not rest:
            return float(word)
        case {"$tuple": list() as items, **rest} if not rest:
            return tuple(_decode_any(items, where))
        case {"$dict": list() as pairs, **rest} if not rest:
            try:
                return {key: item for key, item in _decode_any(pairs, where)}  # noqa: C416
            except (TypeError, ValueError) as error:
                raise _damage(where, f"holds no pairs: {error}") from None
        case dict():
            if strange := [key for key in value if key.startswith(ESCAPE)]:
                raise _damage(where, f"has the unknown key {strange[0]!r}")
            return {key: _decode_any(item, f"{where}.{key}") for key, item in value.items()}
    return value


def _check_lengths(sample: Sample, where: str) -> None:
    columns = (sample.tokens, sample.mask, sample.logprobs, sample.versions)
    lengths = [len(column) for column in columns]
    if len(set(lengths)) != 1:
        raise _damage(where, f"has columns of lengths {lengths}")


def _checked(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _damage(where, f"is {value!r:.60}, no {kind.__name__}")
    return value


def _damage(where: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"the saved groups are damaged: {where} {what}. Resume from another checkpoint"
    )
