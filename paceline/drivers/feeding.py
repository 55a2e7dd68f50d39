"""A policy's side of a feed, which samples ahead of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.drivers.supply import Supply
from paceline.rollout.batch import RolloutBatch
from paceline.rollout.feed import Feed
from paceline.types import JsonValue


@dataclass(frozen=True, slots=True)
class FromFeed:
    """Implements `drivers.supply.Supply`."""

    feed: Feed
    policy: str

    @property
    def epoch(self) -> int:
        return self.feed.epoch(self.policy)

    @property
    def is_exhausted(self) -> bool:
        return self.feed.is_exhausted(self.policy)

    @property
    def is_starved(self) -> bool:
        return self.feed.is_starved(self.policy)

    def holds_up(self, other: Supply) -> bool:
        is_partner = isinstance(other, FromFeed) and other.feed is self.feed
        return is_partner and other.is_starved and self.feed.buffers[self.policy].num_free == 0

    @property
    def lost_tokens(self) -> int:
        return self.feed.lost_tokens(self.policy)

    async def collect(self, step: int) -> RolloutBatch:
        """As the protocol says. Until `learned` is called it gives the same groups again.

        Raises RuntimeError if the step is not the one after the last that was learned: groups and
        weights would not fit.
        """
        trained = self.feed.buffers[self.policy].trained_step
        if step != trained + 1:
            raise RuntimeError(
                f"policy {self.policy!r} asks for the groups of step {step}, "
                f"but has told of step {trained} as its last"
            )
        return await self.feed.take(self.policy)

    def learned(self) -> None:
        self.feed.buffers[self.policy].learned()

    def published(self, step: int) -> None:
        self.feed.buffers[self.policy].published(step)

    def listen(self, listener: Callable[[], None]) -> None:
        for buffer in self.feed.buffers.values():
            buffer.listeners.append(listener)

    def state(self) -> JsonValue:
        return self.feed.state()
