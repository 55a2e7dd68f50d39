"""What became of every prompt: `ledger.jsonl`, one line for each step that a policy has learned.

    {"policy": "policy", "step": 3, "version": 3, "trained": [8, 9, 11],
     "dropped": {"zero_variance": [10]}, "returned": [], "prompts": {"8": "train/p2", ...}}

Numbers are draws, counted over the whole run; `prompts` names theirs. The line is written when the
step has been learned and before it is saved; a resumed run cuts off the lines after its
checkpoint, since those steps are done again. So over all restarts a line is there for every step
that the weights have seen, and for no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.observe.files import REAL_FILES, Files, decode_lines
from paceline.observe.jsonl import JsonlFile
from paceline.types import Group

FILE_NAME = "ledger.jsonl"


@dataclass(slots=True)
class Entry:
    """What a step of one policy has used up."""

    policy: str
    step: int
    version: int
    """Optimizer steps of the weights that the step made."""
    trained: list[int] = field(default_factory=list)
    dropped: dict[str, list[int]] = field(default_factory=dict)
    """Reason -> draws that nobody trains on."""
    returned: list[int] = field(default_factory=list)
    """Draws that were sampled and went back to the data, to be drawn again."""
    prompts: dict[int, str] = field(default_factory=dict)
    """Draw -> name of its prompt."""

    def trains(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self.trained.append(self._named(group))

    def drops(self, group: Group, reason: str) -> None:
        self.dropped.setdefault(reason, []).append(self._named(group))

    def loses(self, draw: int, prompt: str, reason: str) -> None:
        """A dropped draw that has no group."""
        self.dropped.setdefault(reason, []).append(draw)
        self.prompts[draw] = prompt

    def returns(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self.returned.append(self._named(group))

    def _named(self, group: Group) -> int:
        self.prompts[group.draw] = group.prompt.name
        return group.draw


class Ledger:
    """Owns the file in a run's folder. Call `start` before anything."""

    def __init__(self, folder: Path, files: Files = REAL_FILES) -> None:
        self._file = JsonlFile(folder / FILE_NAME, files)

    @property
    def path(self) -> Path:
        return self._file.path

    def start(self, steps: Mapping[str, int]) -> None:
        """Go on after these steps, policy by policy."""
        self._file.keep(lambda line: line["step"] <= steps.get(line["policy"], -1))

    def write(self, entry: Entry) -> None:
        """Durable when it returns. Raises PacelineError if the file can not be written."""
        self._file.append(
            {
                "policy": entry.policy,
                "step": entry.step,
                "version": entry.version,
                "trained": [*entry.trained],
                "dropped": {reason: [*draws] for reason, draws in entry.dropped.items()},
                "returned": [*entry.returned],
                "prompts": {str(draw): name for draw, name in sorted(entry.prompts.items())},
            }
        )


def read_ledger(run: Path) -> list[Entry]:
    """The lines of a run. Raises DataError if it has no ledger, or a damaged line before the last
    one, which alone a kill may have cut off."""
    path = run / FILE_NAME
    if not path.is_file():
        raise DataError(f"there is no {path}: the run has not begun, or is of an older version")
    found = []
    lines = list(decode_lines(path.read_bytes()))
    for number, line in lines:
        if line is None and number == lines[-1][0]:
            break
        try:
            found.append(_entry(line))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path}:{number} is no line of a ledger: {error!r}") from error
    return found


def _entry(line: Any) -> Entry:
    return Entry(
        policy=str(line["policy"]),
        step=int(line["step"]),
        version=int(line["version"]),
        trained=[int(draw) for draw in line["trained"]],
        dropped={str(r): [int(draw) for draw in draws] for r, draws in line["dropped"].items()},
        returned=[int(draw) for draw in line["returned"]],
        prompts={int(draw): str(name) for draw, name in line["prompts"].items()},
    )
