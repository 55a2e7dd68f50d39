"""What a worker pool and its child processes say to each other.

A frame is the number of the request that it is or answers, the length of its body (8 bytes each,
big-endian), and the body. Requests are pickles and go from the parent to its own children only;
replies are JSON, so nothing of the user's is unpickled in the trainer's process.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.rollout.scorers import ScorerOptions

HEAD = struct.Struct(">QQ")
"""Number and length."""
REWARD_NAMES = ("completion", "prompt", "answer", "metadata", "messages", "finish", "num_tokens")
"""What a reward function may ask for."""


@dataclass(frozen=True, slots=True)
class LocatedScorer:
    """A function in a file or module, imported in the child."""

    location: str
    base: str
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PickledScorer:
    """A Python object, sent by value with cloudpickle."""

    data: bytes
    label: str
    weights: Mapping[str, float] = field(default_factory=dict)
    file: str | None = None
    """Where it was defined, for tracebacks: cloudpickle leaves that out."""


@dataclass(frozen=True, slots=True)
class BuiltinScorer:
    """A built-in kind."""

    kind: str
    options: ScorerOptions


ScorerSpec = LocatedScorer | PickledScorer | BuiltinScorer


@dataclass(frozen=True, slots=True)
class Load:
    """Make the scorers ready. Reply: {"error": None or a text}."""

    scorers: Mapping[str, ScorerSpec]
    path: tuple[str, ...]
    """`sys.path` of the parent."""


@dataclass(frozen=True, slots=True)
class Call:
    """Run one scorer. Reply: the fields of a `Score`."""

    scorer: str
    values: Mapping[str, Any]
    """By the names in `REWARD_NAMES`."""


def frame(number: int, body: bytes) -> bytes:
    return HEAD.pack(number, len(body)) + body
