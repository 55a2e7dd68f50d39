"""The nouns of Paceline, each with one meaning. No torch here: a run file is checked without it.

A column of a `Sample` or `Row` is as long as its `tokens`: entry `t` belongs to `tokens[t]`, and
a log-prob at `t` is that of `tokens[t]` given `tokens[:t]`. One length everywhere leaves no room
for a shift by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypedDict

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.floating[Any]]
    IntArray = NDArray[np.integer[Any]]
    BoolArray = NDArray[np.bool_]

NO_VERSION = -1
"""Version of a token that no engine sampled (prompt, observation)."""


class Config(BaseModel):
    """Base of every block of a run file: typed, frozen, no unknown keys, no coercion."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


class Message(TypedDict):
    """One chat message."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of raw input, with a stable id. Either `text` or `messages` is set.

    Example: Prompt(id="add-17", text="12+30=", answer="42")
    """

    id: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    answer: Any = None
    """What the reward compares with; any JSON value."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the row."""
    source: str = ""
    """Name of the prompt set it came from."""

    @property
    def name(self) -> str:
        """Its id with that of its source, which alone may not be unique."""
        return f"{self.source}/{self.id}" if self.source else self.id


@dataclass(frozen=True, slots=True)
class Draw:
    """One drawing of a prompt from the data. The ordinal keeps two drawings of one prompt apart."""

    ordinal: int
    """Counted over the whole run, never used twice; part of every seed."""
    epoch: int
    prompt: Prompt


class Status(StrEnum):
    """How a sample ended. Only the first two can be trained on."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"
    UNSCORED = "unscored"

    @property
    def is_trainable(self) -> bool:
        return self in (Status.COMPLETED, Status.TRUNCATED)


@dataclass(slots=True)
class Sample:
    """One trainable token sequence of one policy.

    Example: prompt [5, 6], answer [7, 2] -> tokens [5, 6, 7, 2], mask [F, F, T, T],
    logprobs [0, 0, -0.3, -0.1], versions [-1, -1, 4, 4].
    """

    policy: str
    prompt_id: str
    episode: int
    """Index of its episode in the group."""
    tokens: list[int]
    mask: list[bool]
    """True where the policy chose the token and may be trained on it."""
    logprobs: list[float]
    """Behaviour log-probs under the sampling distribution; 0.0 outside the mask."""
    versions: list[int]
    """Version of the weights that made each token; NO_VERSION outside the mask."""
    status: Status
    temperature: float = 1.0
    role: str = "policy"
    row: int = 0
    """Index among the samples of its episode (several where turns could not be joined)."""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    text: str = ""
    """The decoded answer, for people to read; never encoded again."""
    finish: str = ""
    """Why generation ended: stop, length, abort."""
    cause: str | None = None
    """What made a sample failed, unscored or aborted, in words to count by: `reward/timeout`."""
    detail: str = ""
    """More about the cause, for people to read: a message, the line of the user's code."""
    label: str = ""
    """Which of several players spoke, such as the earlier self that was drawn."""
    interruptions: int = 0
    """Times that an answer was ended by a publish (`pause = "abort"`) and went on after it."""

    def validate(self) -> None:
        """Raise ValueError if the columns do not fit each other."""
        lengths = {
            "tokens": len(self.tokens),
            "mask": len(self.mask),
            "logprobs": len(self.logprobs),
            "versions": len(self.versions),
        }
        if len(set(lengths.values())) != 1:
            raise ValueError(
                f"sample {self.prompt_id}/{self.episode}: column lengths differ: {lengths}"
            )
        if self.mask and self.mask[0]:
            raise ValueError(
                f"sample {self.prompt_id}/{self.episode}: the first token has no context to be "
                "predicted from and can not be trained"
            )
        for t, trained in enumerate(self.mask):
            if trained and not math.isfinite(self.logprobs[t]):
                raise ValueError(
                    f"sample {self.prompt_id}/{self.episode}: "
                    f"behaviour log-prob at position {t} is {self.logprobs[t]}"
                )

    @property
    def num_trained_tokens(self) -> int:
        return sum(self.mask)


@dataclass(slots=True)
class Episode:
    """One execution of an environment for a prompt."""

    prompt_id: str
    index: int
    samples: list[Sample]
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that the environment reports, such as turns or tool calls."""
    others: list[Sample] = field(default_factory=list)
    """What roles said that do not learn, for people to read. Never trained on; a reward is kept
    where the environment gave one. Without tokens where they are not known."""

    @property
    def is_trainable(self) -> bool:
        return bool(self.samples) and all(s.status.is_trainable for s in self.samples)


@dataclass(slots=True)
class Group:
    """All episodes of one prompt that are compared with each other."""

    prompt: Prompt
    episodes: list[Episode]
    draw: int = 0
    """Which drawing of a prompt this is, counted over the whole run; see `Draw`."""

    def samples(self, policy: str | None = None) -> Iterator[Sample]:
        """Samples in episode order; of one policy if named."""
        for episode in self.episodes:
            for sample in episode.samples:
                if policy is None or sample.policy == policy:
                    yield sample


@dataclass(slots=True)
class Row:
    """One sample made ready for the trainer. All columns have length T = len(tokens)."""

    tokens_T: IntArray
    mask_T: BoolArray
    weights_T: FloatArray
    """Share of each token in the loss: the reduction, with its global denominator worked in."""
    advantages_T: FloatArray
    behaviour_logprobs_T: FloatArray
    old_logprobs_T: FloatArray | None = None
    reference_logprobs_T: FloatArray | None = None
    values_T: FloatArray | None = None
    """A critic's prediction before each token, made before the first update."""
    final_value: float | None = None
    """A critic's prediction after the last token: what a truncated answer may still earn."""
    returns_T: FloatArray | None = None
    """What the critic should have predicted."""
    teacher_logprobs_T: FloatArray | None = None
    """A teacher's, at this row's temperature."""
    teacher_ids_TK: IntArray | None = None
    """The K tokens that a teacher finds most likely at each position."""
    teacher_top_logprobs_TK: FloatArray | None = None
    """The teacher's log-probs of those, at this row's temperature."""
    temperature: float = 1.0
    episode: tuple[str, int] = ("", 0)
    """(prompt id, episode index): rows of one episode share it."""


@dataclass(slots=True)
class Batch:
    """What one optimizer step eats."""

    policy: str
    rows: list[Row]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens_T) for row in self.rows)

    @property
    def num_trained_tokens(self) -> int:
        return sum(int(row.mask_T.sum()) for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did."""

    version: int
    lr: float
    grad_norm: float
    """L2 norm before clipping."""
    is_skipped: bool = False
    """True if a loss or the gradient was not finite: weights and moments are untouched."""
    adapter_norm: float | None = None
    """Frobenius norm of what an adapter now adds to the weights, if that is what is trained."""


def derive_seed(run_seed: int, *keys: str | int) -> int:
    """A 63-bit seed that depends on its keys alone, never on call order.

    Sources of randomness use (run seed, policy, step, prompt id, sample index), so that replica
    count, chunking and restarts change nothing.
    """
    text = "\x1f".join([str(run_seed), *(f"{type(k).__name__}:{k}" for k in keys)])
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


JsonValue = Any
Tokens = Sequence[int]
