"""Values of rows: in the words of an error, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any
from uuid import UUID


class RowError(Exception):
    """Why a row is bad. Never leaves this package: it becomes a `BadRow` or a `DataError`."""


def describe(value: Any) -> str:
    """What a value is, in the words of JSON."""
    match value:
        case None:
            return "null"
        case bool():
            return f"a boolean ({str(value).lower()})"
        case int() | float():
            return f"a number ({value})"
        case str():
            return "a text"
        case Mapping():
            return "an object"
        case list() | tuple():
            return "a list"
        case _:
            return f"a {type(value).__name__}"


def plain(value: Any, column: str) -> Any:
    """A JSON value that stands for `value`.

    Raises:
        RowError: if there is none, or if a text is not valid Unicode.
    """
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return _valid_unicode(value, column)
        case Mapping():
            return {k: plain(v, f"{column}.{k}") for k, v in plain_keys(value, column).items()}
        case list() | tuple():
            return [plain(v, f"{column}[{i}]") for i, v in enumerate(value)]
        case date() | time():
            return value.isoformat()
        case Decimal() | UUID():
            return str(value)
    if hasattr(value, "tolist"):  # numpy arrays and scalars, without importing numpy
        return plain(value.tolist(), column)
    raise RowError(
        f"{column} holds {describe(value)}, which is no JSON value; name the columns to keep in "
        "metadata_keys, or convert it"
    )


def plain_keys(value: Mapping[Any, Any], column: str) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str):
            raise RowError(f"{column} has the key {key!r}, which is not a text")
        _valid_unicode(key, f"a key of {column}")
    return dict(value)


def _valid_unicode(text: str, column: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(
            f"{column} holds a lone surrogate (U+{ord(text[error.start]):04X}) at character "
            f"{error.start}: half of a broken character"
        ) from error
    return text
