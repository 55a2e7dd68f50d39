"""Where the batches of a policy come from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from paceline.data.stream import PromptStream
from paceline.rollout.batch import RolloutBatch
from paceline.types import JsonValue


class Supply(Protocol):
    """What a policy's clock asks for data, and tells of its progress."""

    @property
    def epoch(self) -> int:
        """Passes over the prompts of which this policy has taken everything."""

    @property
    def is_exhausted(self) -> bool:
        """True if no further batch will come."""

    @property
    def is_starved(self) -> bool:
        """True if `collect` waits for what cannot come before another policy moves."""

    def holds_up(self, other: Supply) -> bool:
        """True if `other` waits for groups that can not begin before this policy moves."""

    async def collect(self, step: int) -> RolloutBatch:
        """The groups of a step; none, or fewer than usual, at the end of the data."""

    @property
    def lost_tokens(self) -> int:
        """Tokens sampled before a restart for prompts that begin anew."""

    def learned(self) -> None:
        """The batch that was collected last has been trained on."""

    def published(self, step: int) -> None:
        """The engines serve the weights of this step."""

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this after every change that may starve a policy."""

    def state(self) -> JsonValue:
        """What a checkpoint keeps: a batch that was not learned from counts as not taken."""


@dataclass(slots=True)
class Pull:
    """Collects when it is asked, and nothing before: each batch is sampled for its own step."""

    stream: PromptStream
    take: Callable[[int], Awaitable[RolloutBatch]]
    _before: JsonValue = None
    """The cursor before the batch that is being collected or learned from."""

    @property
    def epoch(self) -> int:
        return self.stream.epoch

    @property
    def is_exhausted(self) -> bool:
        return self.stream.num_left == 0

    @property
    def is_starved(self) -> bool:
        return False

    def holds_up(self, other: Supply) -> bool:
        return False

    @property
    def lost_tokens(self) -> int:
        return 0

    async def collect(self, step: int) -> RolloutBatch:
        self._before = self.stream.state()
        return await self.take(step)

    def learned(self) -> None:
        self._before = None

    def listen(self, listener: Callable[[], None]) -> None: ...

    def state(self) -> JsonValue:
        return self.stream.state() if self._before is None else self._before

    def published(self, step: int) -> None: ...
