"""From a TOML file and overrides to plain tables, with the place of every key."""

from __future__ import annotations

import copy
import datetime
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.config.problems import KeyPath, Places, Problem, dotted
from paceline.errors import ConfigError

Table = dict[str, Any]


def plain(value: Any) -> Any:
    """Python containers as TOML would give them, apart from the caller's own."""
    match value:
        case Mapping():
            return {str(key): plain(item) for key, item in value.items() if item is not None}
        case list() | tuple():
            return [plain(item) for item in value]
        case Path():
            return str(value)
        case _ if hasattr(value, "model_dump"):
            return plain(value.model_dump())
        case _:
            return copy.copy(value)


def read_toml(path: Path) -> tuple[Table, dict[KeyPath, int]]:
    """The tables of a file and the line of each key.

    Raises ConfigError with file, line and column where the file is no valid TOML.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"there is no run file {path}") from None
    except IsADirectoryError:
        hint = f"; did you mean {path / 'run.toml'}?" if (path / "run.toml").is_file() else ""
        raise ConfigError(f"{path} is a folder, not a run file{hint}") from None
    except OSError as error:
        raise ConfigError(f"{path} can not be read: {error.strerror}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not valid UTF-8: {error.reason}") from None
    try:
        return tomllib.loads(text), key_lines(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_syntax_error(path, text, error)) from None


def _syntax_error(path: Path, text: str, error: tomllib.TOMLDecodeError) -> str:
    message = str(error)
    if found := re.search(r" \(at line (\d+), column (\d+)\)$", message):
        line, column = int(found[1]), int(found[2])
    else:
        line, column = text.count("\n") + 1, len(text.rpartition("\n")[2]) + 1
    reason = re.sub(r" \(at .*\)$", "", message)
    lines = text.splitlines()
    shown = f"\n  {lines[line - 1].rstrip()}" if line <= len(lines) and lines[line - 1] else ""
    return f"{path}:{line}:{column}: not valid TOML: {reason}{shown}"


_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|'
    r"'''.*?'{3,5}|"
    r'"(?:\\.|[^"\\\n])*"|'
    r"'[^'\n]*'|#[^\n]*|\n|[\[\]{}=.,]|[^\s\[\]{}=.,\"'#]+",
    re.DOTALL,
)


class _LineScan:
    """Walks the tokens of valid TOML and notes on which line each key stands."""

    def __init__(self, text: str) -> None:
        self.tokens = [(m[0], text.count("\n", 0, m.start()) + 1) for m in _TOKEN.finditer(text)]
        self.at = 0
        self.lines: dict[KeyPath, int] = {}
        self.counts: dict[KeyPath, int] = {}

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while self.at < len(self.tokens):
            token, line = self.tokens[self.at]
            if token == "\n" or token.startswith("#"):
                self.at += 1
            elif token == "[":
                table = self._header()
                self.lines.setdefault(table, line)
            else:
                self._key_and_value(table)
        return self.lines

    def _header(self) -> KeyPath:
        is_list = self.tokens[self.at + 1][0] == "["
        self.at += 2 if is_list else 1
        path = self._place(self._key("]"))
        self.at += 1 if is_list else 0
        if is_list:
            index = self.counts.get(path, -1) + 1
            self.counts[path] = index
            path = (*path, index)
        return path

    def _place(self, parts: list[str]) -> KeyPath:
        """Header parts as a path: a list of tables on the way stands for its last item."""
        path: KeyPath = ()
        for number, part in enumerate(parts):
            path = (*path, part)
            if path in self.counts and number < len(parts) - 1:
                path = (*path, self.counts[path])
        return path

    def _key(self, end: str) -> list[str]:
        parts: list[str] = []
        while self.at < len(self.tokens) and self.tokens[self.at][0] != end:
            token = self.tokens[self.at][0]
            if token != ".":
                parts.append(token[1:-1] if token[0] in "\"'" else token)
            self.at += 1
        self.at += 1
        return parts

    def _key_and_value(self, table: KeyPath) -> None:
        line = self.tokens[self.at][1]
        path = table
        for part in self._key("="):
            path = (*path, part)
            self.lines.setdefault(path, line)
        depth = 0
        while self.at < len(self.tokens):
            token = self.tokens[self.at][0]
            if token == "\n" and depth == 0:
                return
            depth += (token in ("[", "{")) - (token in ("]", "}"))
            self.at += 1


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line of each key and table header of a valid TOML text, counted from 1.

    Keys inside a list or an inline table share the line of the key that holds it.
    """
    return _LineScan(text.replace("\r\n", "\n")).scan()


def parse_override(text: str) -> tuple[KeyPath, Any]:
    """`trainer.lr=1e-5` -> (("trainer", "lr"), 1e-05).

    The value is read as TOML; what is no TOML is a text. An empty value is None: the key is taken
    out. A number in the key is the index of a list item. Raises ConfigError.
    """
    key, sign, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not sign or not all(parts):
        raise ConfigError(f"override {text!r}: write it as key=value, such as trainer.lr=1e-5")
    path = tuple(int(part) if part.isdecimal() else part for part in parts)
    return path, parse_value(value.strip(), text)


def parse_value(value: str, shown: str) -> Any:
    """A value of the command line: TOML, or a bare text. Raises ConfigError on a broken list."""
    if not value:
        return None
    try:
        found = tomllib.loads(f"value = [{value}]")["value"]
    except tomllib.TOMLDecodeError as error:
        if value[0] in "[{\"'":
            reason = re.sub(r" \(at .*\)$", "", str(error))
            raise ConfigError(
                f"override {shown!r}: the value is no valid TOML ({reason}); texts inside a list "
                'need quotes, and the shell needs quotes around it all: \'key=["a", "b"]\''
            ) from None
        return value
    is_one = len(found) == 1 and not value.endswith(",")
    is_date = is_one and isinstance(found[0], datetime.date | datetime.time)
    return found[0] if is_one and not is_date else value


def merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> Table:
    """A new table: `top` over `base`, tables merged, everything else replaced."""
    merged = dict(base)
    for key, value in top.items():
        known = merged.get(key)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(known, value)
        else:
            merged[key] = value
    return merged


def nested(settings: Mapping[str, Any]) -> Table:
    """{"a.b": 1, "a": {"c": 2}} -> {"a": {"b": 1, "c": 2}}; later keys win."""
    tables: Table = {}
    for key, value in settings.items():
        inner: Any = value
        for part in reversed(key.split(".")):
            inner = {part: inner}
        tables = merge(tables, inner)
    return tables


def apply_override(tables: Table, path: KeyPath, value: Any) -> Problem | None:
    """Set, merge or (None) remove one key in place; a problem if the path leads nowhere."""
    node: Any = tables
    for depth, part in enumerate(path[:-1]):
        child = _child(node, part)
        if child is None and isinstance(node, dict):
            child = node[str(part)] = {}
        if not isinstance(child, dict | list):
            return Problem(path, _no_way(path[: depth + 1], child))
        node = child
    last = path[-1]
    if isinstance(node, list):
        if not isinstance(last, int) or last >= len(node):
            return Problem(path, f"the list has {len(node)} items, numbered from 0")
        node[last] = value
    elif value is None:
        node.pop(str(last), None)
    else:
        known = node.get(str(last))
        both_tables = isinstance(known, dict) and isinstance(value, dict)
        node[str(last)] = merge(known, value) if both_tables else value
    return None


def _child(node: Any, part: str | int) -> Any:
    if isinstance(node, dict):
        return node.get(str(part))
    is_index = isinstance(part, int) and part < len(node)
    return node[part] if is_index else None


def _no_way(path: KeyPath, found: Any) -> str:
    if found is None:
        return f"there is no item {dotted(path)}"
    return f"{dotted(path)} is {found!r}, not a table"


def apply_overrides(tables: Table, overrides: Sequence[str], places: Places) -> list[Problem]:
    """All overrides in order, in place; what could not be read or placed is returned."""
    problems: list[Problem] = []
    for text in overrides:
        try:
            path, value = parse_override(text)
        except ConfigError as error:
            problems.append(Problem((), str(error)))
            continue
        places.overrides[path] = text
        if problem := apply_override(tables, path, value):
            problems.append(problem)
    return problems
