"""What is wrong with a run file, where, and what to write instead.

A problem has the path of a key (`("trainer", "lr")`, list items by number) and a text. They are
collected, sorted by where they stand, and raised as one error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import ConfigError

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Example: Problem(("trainer", "lr"), "found 0.0, allowed is a number > 0")
    """

    path: KeyPath
    text: str


@dataclass(slots=True)
class Places:
    """Where each key of the merged tables came from: a line of the file or an override."""

    file: Path | None = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    overrides: dict[KeyPath, str] = field(default_factory=dict)

    def describe(self, path: KeyPath) -> str:
        """`line 12` or `override trainer.lr=0`, of the key or of the nearest table around it."""
        for length in range(len(path), 0, -1):
            head = path[:length]
            if head in self.overrides:
                return f"override {_short(self.overrides[head])}"
            if head in self.lines:
                return f"line {self.lines[head]}"
        return ""

    def order(self, path: KeyPath) -> tuple[int, int]:
        for length in range(len(path), 0, -1):
            head = path[:length]
            if head in self.overrides:
                return (1, list(self.overrides).index(head))
            if head in self.lines:
                return (0, self.lines[head])
        return (2, 0)


def _short(text: str, width: int = 60) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def dotted(path: Iterable[str | int]) -> str:
    """("evals", "sets", 0, "name") -> evals.sets[0].name"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def config_error(problems: Sequence[Problem], places: Places) -> ConfigError:
    """One error that lists all problems, in the order of the file."""
    unique = sorted(dict.fromkeys(problems), key=lambda problem: places.order(problem.path))
    count = f"{len(unique)} errors" if len(unique) > 1 else "1 error"
    lines = [f"{places.file or 'settings'}: {count}"]
    for problem in unique:
        place = places.describe(problem.path)
        head = f"{dotted(problem.path)} ({place})" if place else dotted(problem.path)
        lines.append(f"  {head}: {problem.text}" if head else f"  {problem.text}")
    return ConfigError("\n".join(lines))
