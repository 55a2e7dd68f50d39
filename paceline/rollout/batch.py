"""The groups of one training step: waves of episodes until the batch is full.

    stream.take --> runner.collect --> failures, shaping, dynamic sampling --> RolloutBatch
        ^                                                |
        '------ give_back: surplus, or everything on an error '-- too few left: another wave

Which draws a step uses depends on rewards alone, never on which episode ended first: a wave ends
when all its episodes are in, and groups are kept in the order of their draws.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.errors import RolloutError
from paceline.observe.metrics import Metrics
from paceline.rollout.filters import all_failed, mask_truncated
from paceline.rollout.runner import Runner
from paceline.rollout.settle import settle
from paceline.rollout.summary import summarise
from paceline.types import Draw, Group

logger = logging.getLogger(__name__)


class DrawSource(Protocol):
    """Where prompts come from; `data.stream.PromptStream`."""

    def take(self, n: int) -> list[Draw]:
        """The next n draws; fewer, or none, when exhausted."""

    def give_back(self, draws: Sequence[Draw]) -> None:
        """Draws that were not used; they come first next time."""


@dataclass(slots=True)
class RolloutBatch:
    """What a training step has to learn from."""

    groups: list[Group]
    """In the order of their draws. Episodes that can not be trained on are still in them."""
    metrics: Metrics = field(default_factory=Metrics)
    dropped: list[tuple[Group, str]] = field(default_factory=list)
    """Used but not trained on, with the reason: `zero_variance` or `failed`."""
    discarded: list[Group] = field(default_factory=list)
    """Surplus of over-sampling: their prompts went back to the stream."""
    is_exhausted: bool = False
    """The stream has no more prompts."""
    lost: list[tuple[int, str, str]] = field(default_factory=list)
    """(draw, its prompt's name, reason) of those that were dropped and have no group to show."""


async def collect_batch(
    stream: DrawSource, runner: Runner, *, step: int, num_prompts: int | None = None
) -> RolloutBatch:
    """Collect `num_prompts` groups (default `rollout.prompts_per_step`).

    Gives fewer where the stream is exhausted or `rollout.max_refills` waves were not enough, and
    raises RolloutError if no group at all was left of an unexhausted stream. On any error and on
    cancellation, all draws go back to the stream.
    """
    waves = _Waves(runner, num_prompts or runner.config.prompts_per_step)
    try:
        await waves.run(stream, step)
    except BaseException:
        stream.give_back(waves.draws)
        raise
    return waves.finish(stream, step)


class _Waves:
    """The state of one step's collection."""

    def __init__(self, runner: Runner, num_needed: int) -> None:
        self.draws: list[Draw] = []
        self._runner = runner
        self._config = runner.config
        self._num_needed = num_needed
        self._num_waves = 0
        self._num_short = 0
        self._groups: list[Group] = []
        self._kept: list[Group] = []
        self._dropped: list[tuple[Group, str]] = []

    async def run(self, stream: DrawSource, step: int) -> None:
        """Waves until there are groups enough, the stream is exhausted, or waves are used up."""
        while self._num_waves <= self._config.max_refills and not self._num_short:
            missing = self._num_needed - len(self._kept)
            if not missing > 0:
                return
            factor = 1.0 if self._num_waves else self._config.over_sampling
            # The product of two short decimals may lie a rounding error above a whole number.
            count = math.ceil(round(missing * factor, 6))
            draws = stream.take(count)
            self.draws += draws
            self._num_short = count - len(draws)
            if draws:
                self._num_waves += 1
                self._sort(await self._runner.collect(draws, step=step), step)
        if not self._kept and not self._num_short:
            raise RolloutError(self._nothing_left(step))

    def finish(self, stream: DrawSource, step: int) -> RolloutBatch:
        """Give back the surplus and count everything."""
        kept, surplus = self._kept[: self._num_needed], self._kept[self._num_needed :]
        unused = {group.draw for group in surplus}
        stream.give_back([draw for draw in self.draws if draw.ordinal in unused])
        num_missing = self._num_needed - len(kept)
        if num_missing and not self._num_short:
            logger.warning(
                "step %d: %d of %d groups after %d refills; training on them",
                step, len(kept), self._num_needed, self._num_waves - 1,
            )  # fmt: skip
        metrics = summarise(self._groups, self._runner.policy)
        metrics.sum("rollout/groups", len(kept))
        metrics.sum("rollout/missing_groups", num_missing)
        metrics.sum("rollout/discarded_groups", len(surplus))
        metrics.sum("rollout/refill_waves", max(0, self._num_waves - 1))
        for reason in ("failed", "zero_variance"):
            count = sum(found == reason for _, found in self._dropped)
            metrics.sum(f"rollout/dropped_groups/{reason}", count)
        if self._config.truncated == "mask":
            for group in kept:
                mask_truncated(group)
        is_exhausted = bool(self._num_short) and not surplus
        return RolloutBatch(kept, metrics, self._dropped, surplus, is_exhausted)

    def _sort(self, groups: Sequence[Group], step: int) -> None:
        """Settle one wave's groups and keep or drop each."""
        policy = self._runner.policy
        settled = settle(
            groups, [policy], config=self._config, reward=self._runner.reward, step=step
        )
        self._groups += groups
        for group, reasons in zip(groups, settled, strict=True):
            if (reason := reasons[policy]) is None:
                self._kept.append(group)
            else:
                self._dropped.append((group, reason))
        # A reward that fails every time would fail in every further wave too.
        if not any(episode.is_trainable for group in groups for episode in group.episodes):
            raise all_failed(groups, step)

    def _nothing_left(self, step: int) -> str:
        counts = Counter(reason for _, reason in self._dropped)
        return (
            f"step {step}: none of {len(self._groups)} groups sampled in {self._num_waves} waves "
            f"can be trained on: {counts['zero_variance']} had equal rewards, "
            f"{counts['failed']} failed. Take easier or harder prompts, more "
            "rollout.samples_per_prompt, a higher rollout.sampling.temperature, or more "
            "rollout.max_refills"
        )
