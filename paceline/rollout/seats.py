"""Who plays the roles of an environment.

    Seat            a policy of the run, or a frozen one (learns=False): an engine in this run
    EndpointSeat    a model behind an OpenAI-compatible endpoint
    SeatPool        one of several, drawn anew for each episode: earlier selves

Only a `Seat` that learns makes samples to train on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable

from paceline.engines.base import CutSignal
from paceline.errors import ConfigError, EngineError
from paceline.rollout.actor import Seat
from paceline.rollout.env import Actor
from paceline.types import Draw, Sample


class Player(Actor, Protocol):
    """The actor of one role in one episode, as the runner sees it."""

    role: str
    refusal: EngineError | None
    """A request of this episode could not be served."""
    fatal: Exception | None
    """What the role is played with broke: nothing can be collected any more."""

    @property
    def abort(self) -> str | None:
        """Why an answer of the episode was ended by its engine, if one was."""

    def answers(self) -> list[Sample]:
        """What was said, not scored yet."""


class FrozenSeat(Protocol):
    """Plays a role and does not learn."""

    @property
    def policy(self) -> str:
        """What to call it; not the name of a policy that learns."""

    def actor(
        self,
        role: str,
        draw: Draw,
        *,
        episode: int,
        seed: Callable[[int], int],
        cut: CutSignal | None = None,
    ) -> Player:
        """Speaks for the role in one episode."""


@runtime_checkable
class Pool(Protocol):
    """Chooses who plays a role in an episode; whoever it is does not learn."""

    def pick(self, seed: int) -> tuple[Seat, str]:
        """A seat and what to call it. Depends on the seed and on what is in the pool."""


AnySeat = Seat | FrozenSeat | Pool


class SeatPool:
    """Players under their labels; the newest `keep` of them, each as likely as any other.

    Example: pool.add("step-20", seat) after a copy of the weights was made.
    """

    def __init__(self, keep: int | None = None) -> None:
        self._seats: dict[str, Seat] = {}
        self._keep = keep

    @property
    def labels(self) -> list[str]:
        """The oldest first."""
        return list(self._seats)

    def add(self, label: str, seat: Seat) -> list[Seat]:
        """Put one in; those that had to make room come back, for their owner to dispose of."""
        gone = [self._seats.pop(label)] if label in self._seats else []
        self._seats[label] = seat
        while self._keep is not None and len(self._seats) > self._keep:
            gone.append(self._seats.pop(next(iter(self._seats))))
        return gone

    def pick(self, seed: int) -> tuple[Seat, str]:
        if not self._seats:
            raise ConfigError("there is nobody in the pool of earlier selves: add one first")
        label = self.labels[seed % len(self._seats)]
        return self._seats[label], label


def seat_for(seat: AnySeat, seed: int) -> Seat | FrozenSeat:
    """Who plays in an episode: the seat, or the one that its pool picks with the seed."""
    if not isinstance(seat, Seat) and isinstance(seat, Pool):
        chosen, label = seat.pick(seed)
        return replace(chosen, learns=False, label=label)
    return seat


def learning_policies(seats: Mapping[str, AnySeat]) -> dict[str, str]:
    """Role -> policy, of the roles that learn."""
    return {r: s.policy for r, s in seats.items() if isinstance(s, Seat) and s.learns}
