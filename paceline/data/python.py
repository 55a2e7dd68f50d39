"""Rows made by the user's own code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.data.rows import RawRow
from paceline.data.sources import PythonSource
from paceline.data.values import nearest
from paceline.errors import ConfigError, DataError


def read_function(source: PythonSource, base: Path) -> Iterable[RawRow]:
    """The rows that the function returns, counted from 0.

    Raises:
        ConfigError: if the module, the file or the name in it is not found.
        DataError: if the user's code raises, or does not give an iterable.
    """
    place, _, name = source.function.rpartition(":")
    module = _module(place, base)
    if not hasattr(module, name):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise ConfigError(f"{place} has no {name!r}{nearest(name, public)}")
    return _rows(getattr(module, name), source.function, source.label)


def _rows(made: Any, function: str, label: str) -> Iterator[RawRow]:
    try:
        rows = made() if callable(made) else made
        if isinstance(rows, str) or not isinstance(rows, Iterable):
            raise TypeError(f"gave a {type(rows).__name__}, not an iterable of rows")
        for index, row in enumerate(rows):
            yield RawRow(f"{label}[{index}]", row)
    # The user's code may raise anything.
    except Exception as error:
        raise DataError(f"{function}: {type(error).__name__}: {error}") from error


def _module(place: str, base: Path) -> ModuleType:
    try:
        if place.endswith(".py"):
            return _module_of_file(base / Path(place).expanduser(), place)
        _add_to_path(base)
        return importlib.import_module(place)
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise DataError(f"{place} can not be imported: {error}") from error
        raise ConfigError(
            f"no module named {error.name!r}: for a file beside the run file write "
            f'"{place.replace(".", "/")}.py:function"'
        ) from error
    # The user's code may raise anything.
    except Exception as error:
        raise DataError(f"{place} can not be imported: {type(error).__name__}: {error}") from error


def _module_of_file(path: Path, shown: str) -> ModuleType:
    if not path.is_file():
        names = [p.name for p in path.parent.glob("*.py")]
        raise ConfigError(f"no file {shown} in {path.parent}{nearest(path.name, names)}")
    path = path.resolve()
    name = f"paceline_rows_{blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{shown} can not be imported as Python")
    _add_to_path(path.parent)
    module = module_from_spec(spec)
    # Data classes and pickling look their module up here.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _add_to_path(folder: Path) -> None:
    """Let modules of this folder be imported, after those that can be already."""
    text = str(folder.resolve())
    if text not in sys.path:
        sys.path.append(text)
