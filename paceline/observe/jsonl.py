"""A JSONL file that survives crashes: whole lines only, cut where a resumed run goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.observe.files import (
    NON_FINITE,
    REAL_FILES,
    Files,
    clear_leftovers,
    decode_lines,
    encode_json,
    write_atomically,
)
from paceline.types import JsonValue

logger = logging.getLogger(__name__)


class JsonlFile:
    """One object a line, durable after `append`. Failing to write is a PacelineError."""

    def __init__(self, path: Path, files: Files = REAL_FILES) -> None:
        self.path = path
        self._files = files

    def append(self, item: dict[str, JsonValue]) -> None:
        try:
            self._files.append(self.path, encode_json(item))
        except OSError as error:
            raise PacelineError(
                f"can not write to {self.path}: {error}. Make room or mend the permissions and "
                "start the run again: it resumes."
            ) from error

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Drop all other objects and a last line that was cut off; returns what stays.

        The file is replaced in one move, and only if something is dropped.
        """
        clear_leftovers(self.path.parent, self.path.name, self._files)
        data = self._read()
        kept, lines = [], []
        raw = data.split(b"\n")
        for number, item in decode_lines(data):
            if item is None:
                logger.warning("%s:%d is no JSON object and is dropped", self.path, number)
            elif wanted(item):
                kept.append(item)
                lines.append(raw[number - 1] + b"\n")
        if b"".join(lines) != data:
            self._replace(b"".join(lines))
        return kept

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise PacelineError(f"can not read {self.path}: {error}") from error

    def _replace(self, data: bytes) -> None:
        try:
            write_atomically(self.path, data, self._files)
        except OSError as error:
            raise PacelineError(f"can not write {self.path}: {error}") from error


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, with non-finite numbers as floats; damaged lines left out."""
    if not path.exists():
        return []
    rows = [item for _, item in decode_lines(path.read_bytes()) if item is not None]
    return [{name: _decode(name, value) for name, value in row.items()} for row in rows]


def _decode(name: str, value: Any) -> Any:
    is_metric = "/" in name and isinstance(value, str)
    return NON_FINITE.get(value, value) if is_metric else value
