"""Changes of the file system that must survive a crash, as a small layer that tests can stop.

A file is durable when it and the folder that names it are synced. A rename replaces its target
in one move, so a reader sees the old file or the new one, never half of one.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from paceline.types import JsonValue

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Files:
    """The operations. A test's own version raises at the n-th of them, as a crash would."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True)

    def write(self, path: Path, data: bytes) -> None:
        """Create or replace; durable only after `sync`."""
        path.write_bytes(data)

    def append(self, path: Path, data: bytes) -> None:
        """Add to the end in one call, durably."""
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            while data:
                data = data[os.write(handle, data) :]
            self._flush(handle)
        finally:
            os.close(handle)

    def sync(self, path: Path) -> None:
        """Bring a file's content, or a folder's list of names, to the disk."""
        handle = os.open(path, os.O_RDONLY)
        try:
            self._flush(handle)
        finally:
            os.close(handle)

    def _flush(self, handle: int) -> None:
        os.fsync(handle)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path)


REAL_FILES = Files()


def unique_name(stem: str) -> str:
    """A name that no other process uses, such as `.tmp-step-000012-9f86d081`."""
    return f"{stem}-{secrets.token_hex(4)}"


def write_atomically(path: Path, data: bytes, files: Files = REAL_FILES) -> None:
    """Replace a file durably and in one move; on error the old one stays and nothing is left."""
    temporary = path.with_name(unique_name(f".tmp-{path.name}"))
    try:
        files.write(temporary, data)
        files.sync(temporary)
        files.rename(temporary, path)
        files.sync(path.parent)
    except BaseException:
        files.remove(temporary)
        raise


def clear_leftovers(folder: Path, name: str, files: Files = REAL_FILES) -> None:
    """Remove what killed processes left of `write_atomically`; `name` may hold `*`."""
    for path in folder.glob(f".tmp-{name}-" + "[0-9a-f]" * 8):
        files.remove(path)


def set_aside(paths: Iterable[Path], files: Files = REAL_FILES) -> list[Path]:
    """Move what is there of these to `<name>.old`, or `<name>.old.2` and so on: the first suffix
    that is free for all of them. Returns where they went."""
    found = [path for path in paths if path.exists()]
    for number in itertools.count(1):
        suffix = ".old" if number == 1 else f".old.{number}"
        targets = [path.with_name(path.name + suffix) for path in found]
        if not any(target.exists() for target in targets):
            break
    for path, target in zip(found, targets, strict=True):
        files.rename(path, target)
    return targets


def encode_json(value: JsonValue, *, indent: int | None = None) -> bytes:
    """Standard JSON with a final newline; non-finite numbers become the strings of `NON_FINITE`.

    A lone surrogate is escaped, since UTF-8 has no room for it.
    """
    try:
        text = _encoder(False, indent).encode(value)
    except ValueError:  # a number that is not finite
        value = _without_non_finite(value)
        text = _encoder(False, indent).encode(value)
    try:
        return f"{text}\n".encode()
    except UnicodeEncodeError:
        return f"{_encoder(True, indent).encode(value)}\n".encode()


@cache
def _encoder(ensure_ascii: bool, indent: int | None) -> json.JSONEncoder:
    separators = (",", ":") if indent is None else None
    return json.JSONEncoder(
        ensure_ascii=ensure_ascii, allow_nan=False, indent=indent, separators=separators
    )


def _without_non_finite(value: JsonValue) -> JsonValue:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _without_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(item) for item in value]
    return value


def as_number(value: Any) -> float | None:
    """A number of a decoded file, non-finite ones included; None if the value is no number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    return NON_FINITE.get(value) if isinstance(value, str) else None


def decode_lines(data: bytes) -> Iterable[tuple[int, dict[str, Any] | None]]:
    """(line number, object) for each line of a JSONL file; None where a line is no object."""
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        yield number, value if isinstance(value, dict) else None
