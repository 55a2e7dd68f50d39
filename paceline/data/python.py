"""Rows made by the user's own code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from paceline.data.rows import RawRow
from paceline.data.sources import PythonSource
from paceline.errors import ConfigError, DataError
from paceline.user_code import NOT_OF_USER_CODE, failure_text, load_object


def read_function(source: PythonSource, base: Path) -> Iterable[RawRow]:
    """The rows that the function returns, counted from 0.

    Raises:
        ConfigError: if the module, the file or the name in it is not found.
        DataError: if the user's code raises, or does not give an iterable.
    """
    try:
        made = load_object(source.function, base)
    except (ConfigError, *NOT_OF_USER_CODE):
        raise
    # The user's code may raise anything, also by `sys.exit`.
    except BaseException as error:
        place = source.function.rpartition(":")[0]
        raise DataError(f"{place} can not be imported: {failure_text(error)}") from error
    return _rows(made, source.function, source.label)


def _rows(made: Any, function: str, label: str) -> Iterator[RawRow]:
    try:
        rows = made() if callable(made) else made
        if isinstance(rows, str) or not isinstance(rows, Iterable):
            raise TypeError(f"gave a {type(rows).__name__}, not an iterable of rows")
        for index, row in enumerate(rows):
            yield RawRow(f"{label}[{index}]", row)
    except NOT_OF_USER_CODE:
        raise
    # The user's code may raise anything, also by `sys.exit`.
    except BaseException as error:
        raise DataError(f"{function}: {failure_text(error)}") from error
