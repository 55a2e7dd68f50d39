"""What a feed needs of others: a stream, a runner, and buffers such as `data.buffer.Buffer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeGuard

from paceline.rollout.batch import DrawSource
from paceline.rollout.settings import RolloutConfig
from paceline.rollout.settle import FailurePolicy
from paceline.types import Draw, Group, JsonValue


class DrawStream(DrawSource, Protocol):
    """A source of draws with a cursor; `data.stream.PromptStream`."""

    @property
    def epoch(self) -> int:
        """Epochs of which every draw is out."""

    @property
    def num_left(self) -> int | None:
        """Draws until it is exhausted; None if it never is."""

    def state(self, unfinished: Sequence[Draw] = ()) -> dict[str, Any]:
        """The cursor, with `unfinished` draws as if given back."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to where a state was taken."""


class GroupRunner(Protocol):
    """Plays episodes; `rollout.runner.Runner`."""

    @property
    def config(self) -> RolloutConfig: ...

    @property
    def reward(self) -> FailurePolicy | None: ...

    async def collect(self, draws: Sequence[Draw], *, step: int) -> list[Group]:
        """One group a draw, in order."""


class CutsShort(GroupRunner, Protocol):
    """A runner that can end answers early."""

    def cut_short(self, draw: Draw) -> bool:
        """End the answers of a draw that is being collected, without waiting for it.

        Its `collect` then gives its group soon, with truncated answers.
        """


def cuts_short(runner: GroupRunner) -> TypeGuard[CutsShort]:
    return callable(getattr(runner, "cut_short", None))


class CountsTokens(GroupRunner, Protocol):
    """A runner that knows what a kill would lose."""

    def tokens_under_way(self) -> dict[str, int]:
        """Policy -> tokens that it has sampled for draws that are still being collected."""


def counts_tokens(runner: GroupRunner) -> TypeGuard[CountsTokens]:
    return callable(getattr(runner, "tokens_under_way", None))


class LostDraw(Protocol):
    """A draw that was used but is not trained on; `data.tickets.Dropped`."""

    @property
    def ordinal(self) -> int: ...

    @property
    def prompt(self) -> str: ...

    @property
    def reason(self) -> str: ...

    @property
    def group(self) -> Group | None: ...


class TakenGroups(Protocol):
    """The groups of one step; `data.tickets.Taken`."""

    @property
    def groups(self) -> list[Group]: ...

    @property
    def staleness(self) -> list[int]: ...

    @property
    def dropped(self) -> Sequence[LostDraw]: ...

    @property
    def num_stragglers(self) -> int: ...

    @property
    def num_ready(self) -> int: ...

    @property
    def is_exhausted(self) -> bool: ...


class GroupBuffer(Protocol):
    """Groups of one policy between sampling and training; `data.buffer.Buffer`."""

    @property
    def batch(self) -> int: ...

    @property
    def max_staleness(self) -> int: ...

    @property
    def on_full(self) -> Literal["wait", "drop_oldest"]: ...

    @property
    def trained_step(self) -> int: ...

    @property
    def num_free(self) -> int | None: ...

    @property
    def is_starved(self) -> bool: ...

    @property
    def first_epoch(self) -> int | None: ...

    @property
    def listeners(self) -> list[Callable[[], None]]: ...

    def blocking(self) -> list[int]: ...

    def admit(self, draw: Draw) -> None: ...

    def deliver(self, ordinal: int, group: Group) -> None: ...

    def drop(self, ordinal: int, reason: str, group: Group | None = None) -> None: ...

    def withdraw(self, ordinal: int) -> None: ...

    def note_straggler(self) -> None: ...

    def close(self) -> None: ...

    def fail(self, failure: BaseException) -> None: ...

    async def take(self, n: int | None = None) -> TakenGroups: ...

    def learned(self) -> None: ...

    def published(self, step: int) -> None: ...

    def state(self, groups: dict[str, JsonValue]) -> dict[str, JsonValue]: ...

    def restore(
        self,
        state: Mapping[str, Any],
        groups: Mapping[str, Any],
        known: dict[str, Group],
        *,
        step: int,
    ) -> None: ...
