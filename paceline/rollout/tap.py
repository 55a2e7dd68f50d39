"""One policy's end of a feed."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.rollout.batch import RolloutBatch
from paceline.rollout.feed import Feed


@dataclass(frozen=True, slots=True)
class Tap:
    """What the clock of a policy asks for data, and tells of its progress."""

    feed: Feed
    policy: str

    @property
    def epoch(self) -> int:
        """Passes over the prompts of which this policy has taken everything."""
        return self.feed.epoch(self.policy)

    @property
    def is_exhausted(self) -> bool:
        """True if no further batch will come."""
        return self.feed.is_exhausted(self.policy)

    async def collect(self, step: int) -> RolloutBatch:
        """Wait for the groups of a step; none, or fewer than usual, at the end of the data.

        Until `learned` is called it gives the same groups again. Raises RuntimeError if the step
        is not the one after the last that was learned: groups and weights would not fit.
        """
        trained = self.feed.buffers[self.policy].trained_step
        if step != trained + 1:
            raise RuntimeError(
                f"policy {self.policy!r} asks for the groups of step {step}, "
                f"but has told of step {trained} as its last"
            )
        return await self.feed.take(self.policy)

    def learned(self) -> None:
        """The groups of the last `collect` are trained on."""
        self.feed.buffers[self.policy].learned()

    def published(self, step: int) -> None:
        """The engines serve the weights of this step; sampling may go on."""
        self.feed.buffers[self.policy].published(step)
