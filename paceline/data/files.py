"""Rows of JSONL, JSON, CSV and Parquet files, each with the place where it stands."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from paceline.data.rows import RawRow
from paceline.data.values import describe
from paceline.errors import DataError, nearest_hint

Format = Literal["jsonl", "json", "csv", "parquet"]

SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}


def read_file(path: Path, shown: str, format: Literal["auto"] | Format) -> Iterable[RawRow]:
    """The rows of a file. Lines count from 1, objects of JSON and rows of Parquet from 0.

    Args:
        path: the file.
        shown: its name in errors.
        format: how to read it; "auto" goes by the suffix.

    Raises:
        DataError: if the file can not be read as a whole. What is wrong with single rows is kept
            in them.
    """
    _check_is_file(path, shown)
    if format == "auto":
        suffix = path.suffix.lower()
        if suffix not in SUFFIXES:
            raise DataError(
                f"{shown}: can not tell the format by the suffix {suffix!r}: set format to one of "
                f"{', '.join(dict.fromkeys(SUFFIXES.values()))}"
            )
        format = SUFFIXES[suffix]
    match format:
        case "jsonl":
            return _jsonl_rows(_text(path, shown), shown)
        case "json":
            return _json_rows(_text(path, shown), shown)
        case "csv":
            return _csv_rows(_text(path, shown), shown)
        case "parquet":
            return _parquet_rows(path, shown)


def _check_is_file(path: Path, shown: str) -> None:
    if path.is_dir():
        raise DataError(f"{shown}: is a folder, not a file")
    if path.exists():
        return
    if not path.parent.is_dir():
        raise DataError(f"{shown}: no such file: the folder {path.parent} does not exist")
    names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    raise DataError(f"{shown}: no such file in {path.parent}{nearest_hint(path.name, names)}")


def _text(path: Path, shown: str) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{shown}: can not be read: {error.strerror}") from error
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{shown}: is UTF-16: save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The codec counts from behind a byte order mark.
        offset = error.start + (3 if data.startswith(b"\xef\xbb\xbf") else 0)
        line = data.count(b"\n", 0, offset) + 1
        raise DataError(
            f"{shown}:{line}: is not UTF-8 (byte 0x{data[offset]:02x} at offset {offset}): save it "
            "as UTF-8"
        ) from error


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object. Raises ValueError for a key that stands in it twice: one value would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twin = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twin!r} stands in an object twice")
    return found


def _object(value: Any, where: str) -> RawRow:
    if isinstance(value, dict):
        return RawRow(where, value)
    return RawRow(where, problem=f"is {describe(value)}, not an object with columns")


def _jsonl_rows(text: str, shown: str) -> Iterator[RawRow]:
    # Not splitlines(), which also splits at characters that JSON texts may hold.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line or line.isspace():
            continue
        where = f"{shown}:{number}"
        try:
            value = json.loads(line, object_pairs_hook=_without_twins)
        except json.JSONDecodeError as error:
            yield RawRow(where, problem=f"broken JSON: {error.msg} at column {error.colno}")
        except (ValueError, RecursionError) as error:
            yield RawRow(where, problem=f"broken JSON: {error}")
        else:
            yield _object(value, where)


def _json_rows(text: str, shown: str) -> Iterator[RawRow]:
    if not text.strip():
        return
    try:
        value = json.loads(text, object_pairs_hook=_without_twins)
    except json.JSONDecodeError as error:
        hint = ': for one object a line set format = "jsonl"' if error.msg == "Extra data" else ""
        raise DataError(
            f"{shown}:{error.lineno}: broken JSON: {error.msg} at column {error.colno}{hint}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{shown}: broken JSON: {error}") from error
    rows = value.get("data") if isinstance(value, dict) else value
    if not isinstance(rows, list):
        found = describe(value)
        if isinstance(value, dict):
            found = f"an object with the keys {', '.join(map(repr, value)) or '(none)'}"
        raise DataError(f'{shown}: is {found}; a list of objects is needed, or {{"data": [...]}}')
    for index, row in enumerate(rows):
        yield _object(row, f"{shown}[{index}]")


def _csv_rows(text: str, shown: str) -> Iterator[RawRow]:
    records = iter(_csv_records(text))
    line, header = next(records, (1, []))
    if isinstance(header, str):
        raise DataError(f"{shown}:{line}: the header can not be read: {header}")
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise DataError(f"{shown}:{line}: the header names the column {twice[0]!r} twice")
    for line, fields in records:
        where = f"{shown}:{line}"
        if isinstance(fields, str):
            yield RawRow(where, problem=f"broken CSV: {fields}")
        elif len(fields) != len(header):
            yield RawRow(where, problem=f"has {len(fields)} fields; the header has {len(header)}")
        else:
            yield RawRow(where, dict(zip(header, fields, strict=True)))


def _csv_records(text: str) -> list[tuple[int, list[str] | str]]:
    """(first line, fields) of all records that are not blank; a reason in place of the fields of
    a broken one."""
    records: list[tuple[int, list[str] | str]] = []
    limit = csv.field_size_limit(sys.maxsize)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        while True:
            line = reader.line_num + 1
            try:
                fields = next(reader)
            except StopIteration:
                return records
            except csv.Error as error:
                records.append((line, str(error)))
            else:
                if fields:
                    records.append((line, fields))
    finally:
        csv.field_size_limit(limit)


def _parquet_rows(path: Path, shown: str) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{shown}: can not be read as Parquet: {error}") from error
    for index, row in enumerate(rows):
        yield RawRow(f"{shown}[{index}]", row)
