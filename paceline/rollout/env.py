"""The environment seam: an ordinary async callable that talks in messages and returns rewards.

It never sees tokens, weights or buffers. The simplest one asks once and scores the answer:

    async def ask_once(prompt, actors):
        reply = await actors["policy"](prompt)
        return Outcome({"policy": 1.0 if reply.text == prompt.answer else 0.0})

With several roles, each has an actor and a reward, which may depend on what the others said. Who
plays a role, and whether that one learns, is said by the run file. A role that is not asked in an
episode takes no part in it and needs no reward; one that spoke and learns needs one:

    async def solve_and_check(prompt, actors):
        answer = await actors["solver"](prompt)
        is_right = answer.text.strip() == prompt.answer
        verdict = await actors["verifier"](f"{prompt.text}{answer.text}\nRight (y/n)? ")
        is_seen = (verdict.text.strip() == "y") == is_right
        return {"solver": float(is_right), "verifier": float(is_seen)}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.types import Message, Prompt, Status


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of a model, as an environment sees it."""

    text: str
    """Decoded without end tokens and without the stop text."""
    finish: str
    """stop, length or abort."""
    num_tokens: int


class Actor(Protocol):
    """Lets one role speak. Its tokens become samples of the policy that plays the role."""

    async def __call__(self, context: Prompt | str | Sequence[Message]) -> Reply:
        """Answer a prompt, a plain text, or a list of messages.

        A list that extends a former one by its reply and by new messages goes on with the same
        token ids, and so does a text that extends a former text: nothing is encoded twice.
        """


@dataclass(slots=True)
class Outcome:
    """What an episode earned."""

    rewards: dict[str, float | None]
    """Role -> reward; None if it could not be scored. Those of silent roles are not read."""
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    """Role -> named parts of the reward, for logging."""
    status: dict[str, Status] = field(default_factory=dict)
    """Role -> status, where the environment knows better than the runner."""
    cause: str | None = None
    """Why something was not scored."""
    metrics: dict[str, float] = field(default_factory=dict)
    is_scored: bool = True
    """False if there was nothing to score: a sample without reward is then no failure. Only for
    algorithms that learn without rewards."""


class Env(Protocol):
    """One execution is one episode. There is an actor for each role, whoever plays it.

    Besides an `Outcome` it may return what each role earned as a dict by role, or one reward for
    all of them, as a reward function would: a number, a dict of named parts, or None.
    """

    async def __call__(self, prompt: Prompt, actors: Mapping[str, Actor]) -> Outcome: ...
