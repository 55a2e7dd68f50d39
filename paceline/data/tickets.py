"""What a buffer keeps and gives: tickets for draws, the groups of a step, and what was lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paceline.types import Draw, Group

OnFull = Literal["wait", "drop_oldest"]
EventKind = Literal["running", "sampled", "dropped", "withdrawn", "taken", "trained"]


@dataclass(frozen=True, slots=True)
class Event:
    """What befell one draw, for a ledger."""

    kind: EventKind
    policy: str
    ordinal: int
    step: int
    """running: the last published step; taken, trained: the step that trains on it; otherwise the
    last trained step."""
    reason: str = ""


@dataclass(slots=True)
class Dropped:
    """A draw that was used but is not trained on."""

    ordinal: int
    prompt: str
    """Name of its prompt: `types.Prompt.name`."""
    reason: str
    group: Group | None
    """None where it was not sampled to its end, or is not worth its memory."""


@dataclass(slots=True)
class Taken:
    """The groups of one step, in the order of their draws, and what was lost on the way."""

    groups: list[Group]
    staleness: list[int]
    """Steps between the weights served at a group's admission and those it is trained from."""
    dropped: list[Dropped]
    """Draws before the last one of `groups` that no earlier step has told of."""
    num_stragglers: int
    num_ready: int
    """Groups that are still in the buffer."""
    is_exhausted: bool
    """There were fewer than asked for, and there will be no more."""


@dataclass(slots=True)
class Ticket:
    """A draw that was admitted and is neither dropped nor trained on."""

    draw: Draw
    admitted: int
    """The last published step at admission."""
    group: Group | None = None
    """None while it is running."""


@dataclass(slots=True)
class Step:
    """What is taken and not learned yet."""

    taken: Taken
    tickets: list[Ticket] = field(default_factory=list)
