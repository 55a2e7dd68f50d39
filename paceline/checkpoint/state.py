"""`state.json`: where a run stands. A restore reads it before anything else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.errors import CheckpointError, ResumeMismatchError
from paceline.observe.files import encode_json
from paceline.types import JsonValue

FORMAT = 1
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""Format -> what turns a document of that format into one of the next."""


@dataclass(frozen=True, slots=True)
class PolicyProgress:
    """Where one policy stands."""

    step: int
    """Steps finished on its own clock."""
    version: int
    """Optimizer steps done, over all restarts."""
    critic_version: int | None = None
    """Those of its critic; None without one."""
    baselines: dict[str, list[float]] = field(default_factory=dict)
    """Role -> [mean, count] of earlier rewards: the running baselines."""


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run stands, and what it must be resumed with."""

    step: int
    """Steps finished by the leader."""
    leader: str
    """The policy whose steps count for saves, evals and the end of the run."""
    policies: dict[str, PolicyProgress]
    seed: int
    epoch_ended: bool = False
    """An epoch of the data ended in this step, so that what is due then may still be owed."""
    fingerprint: dict[str, JsonValue] = field(default_factory=dict)
    """What a resumed run must have in common with this one, as nested tables of JSON values."""
    metrics: dict[str, JsonValue] = field(default_factory=dict)
    """Numbers of steps whose rows were not written yet: `Recorder.pending`."""
    threads: int | None = None
    """CPU threads of the trainer: sums depend on it in the last bit, so a resume keeps it."""
    environment: dict[str, JsonValue] = field(default_factory=dict)
    """Versions and platform at the time of the save, for people to read."""

    def to_json(self) -> dict[str, JsonValue]:
        return {"format": FORMAT, **asdict(self)}

    def encode(self) -> bytes:
        """What `state.json` holds."""
        return encode_json(self.to_json(), indent=1)

    @classmethod
    def from_json(cls, document: Mapping[str, Any], where: str = "state.json") -> RunState:
        """Raises CheckpointError if the format is unknown or a key is missing or unknown."""
        content = _migrate(dict(document), where)
        try:
            policies = {n: PolicyProgress(**p) for n, p in content.pop("policies").items()}
            return cls(policies=policies, **content)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{where} is not a run state: {error}") from error


def _migrate(document: dict[str, Any], where: str) -> dict[str, Any]:
    found = document.get("format")
    if not isinstance(found, int) or found > FORMAT:
        raise CheckpointError(
            f"{where} has format {found!r}, and this version of Paceline reads up to {FORMAT}: "
            "resume with the version that wrote it, or a newer one"
        )
    for number in range(found, FORMAT):
        if number not in MIGRATIONS:
            raise CheckpointError(
                f"{where} has format {found}, which this version of Paceline no longer reads: "
                "resume with the version that wrote it, or start from the exported model in "
                "policies/<name>/model"
            )
        document = MIGRATIONS[number](document)
    document.pop("format", None)
    return document


def check_compatible(
    state: RunState, expected: Mapping[str, JsonValue], where: str = "the checkpoint"
) -> None:
    """Raise ResumeMismatchError with every difference between the saved fingerprint and this one.

    Example: {"data": {"fingerprint": "a1"}} against "b2" gives the line
    "data.fingerprint: saved 'a1', now 'b2'".
    """
    saved, now = _as_saved(state.fingerprint), _as_saved(expected)
    differences = list(_differences("", saved, now))
    if differences:
        listed = "\n".join(f"  {line}" for line in differences)
        raise ResumeMismatchError(
            f"{where} belongs to a run with other settings:\n{listed}\n"
            "Go back to the saved settings, or start a run of another name (run.name)."
        )


MISSING = object()


def _differences(path: str, saved: Any, now: Any) -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(now, dict):
        inner = f"{path}." if path else ""
        if saved.get("kind") != now.get("kind"):
            # Another kind has other keys: listing them all would hide what was changed.
            yield from _differences(f"{inner}kind", saved.get("kind"), now.get("kind"))
            return
        for key in [*saved, *(k for k in now if k not in saved)]:
            yield from _differences(f"{inner}{key}", saved.get(key, MISSING), now.get(key, MISSING))
    elif saved != now:
        yield f"{path}: saved {_show(saved)}, now {_show(now)}"


def _as_saved(value: Mapping[str, JsonValue]) -> Any:
    """As it comes back from a file: tuples are lists, infinities are strings."""
    return json.loads(encode_json(dict(value)))


def _show(value: Any) -> str:
    if value is MISSING:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
