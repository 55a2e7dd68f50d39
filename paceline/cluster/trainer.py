"""A trainer whose work is done by a group of worker processes, one a rank.

Each rank gets rows with about as many tokens as any other; rows stay in their order, and so mostly
with the others of their prompt, whose prefix they share. Results come back in the order of the
rows, and metrics are merged as partial results, so the number of ranks changes no number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paceline.algorithms.base import Objective
from paceline.cluster.base import WorkerGroup, WorkerSpec
from paceline.cluster.trainer_source import GroupSource
from paceline.models import ModelConfig
from paceline.observe.metrics import Metrics
from paceline.trainers.base import FSDPTrainerConfig, Head, Later, Place
from paceline.trainers.core import split_idle
from paceline.trainers.fsdp import FSDPRank
from paceline.trainers.fsdp_weights import ModelSource
from paceline.trainers.inputs import check_columns
from paceline.trainers.layout import input_lengths
from paceline.types import Batch, Row, StepReport
from paceline.weights.base import WeightPlan

if TYPE_CHECKING:
    from paceline.types import FloatArray

LOOK_S = 0.2
"""Seconds between looks at a checkpoint that is being written."""


def trainer_spec(
    name: str,
    config: FSDPTrainerConfig,
    source: ModelSource,
    objective: Objective,
    *,
    horizon: int,
    reference: ModelSource | None = None,
    tokenizer: ModelConfig | None = None,
    seed: int = 0,
) -> WorkerSpec:
    """The workers of a sharded trainer; see `paceline.trainers.fsdp.FSDPRank`."""
    return WorkerSpec(
        name,
        FSDPRank,
        {
            "config": config,
            "source": source,
            "objective": objective,
            "horizon": horizon,
            "reference": reference,
            "tokenizer": tokenizer,
            "seed": seed,
        },
        size=config.ranks,
        threads=config.threads,
    )


class GroupTrainer:
    """Implements `paceline.trainers.base.Trainer` over a group that `trainer_spec` describes."""

    def __init__(self, group: WorkerGroup, objective: Objective, head: Head = "policy") -> None:
        """head: what the group trains."""
        self._group = group
        self._objective = objective
        self._head: Head = head
        self._version = 0
        self._source = GroupSource(group)
        self._is_saving = False

    @property
    def version(self) -> int:
        """Optimizer steps done over all restarts, skipped ones included."""
        return self._version

    async def forward(self, rows: list[Row], head: Head) -> list[FloatArray]:
        """Per row, what the head says of its trained tokens, and 0.0 elsewhere."""
        parts = deal(rows, self._group.size)
        results = await self._group.scatter("forward", [(part, head) for part in parts])
        return [scored_T for result in results for scored_T in result]

    async def forward_backward(self, batch: Batch) -> Metrics:
        """Add the gradients of all ranks' micro-batches of one optimizer step."""
        check_columns(batch.rows, self._objective, self._head)
        size = self._group.size
        if self._objective.learns_by_advantage_alone:
            # Rows without a gradient cost less: each rank gets its share of either kind.
            kinds = [deal(rows, size) for rows in split_idle(batch.rows)]
            parts = [learning + idle for learning, idle in zip(*kinds, strict=True)]
        else:
            parts = deal(batch.rows, size)
        batches = [(Batch(batch.policy, part),) for part in parts]
        merged = Metrics()
        for metrics in await self._group.scatter("forward_backward", batches):
            merged.merge(metrics)
        return merged

    async def optim_step(self) -> StepReport:
        """Clip, step, advance the schedule; a non-finite number on one rank skips it on all."""
        reports: list[StepReport] = await self._group.call("optim_step")
        self._version = reports[0].version
        return reports[0]

    async def send(self, plan: WeightPlan) -> WeightPlan:
        """The plan with this trainer's end of the publish."""
        return replace(plan, source=self._source.of(plan))

    async def save(self, path: Path, later: Later | None = None) -> None:
        """Write the folder described in `paceline.trainers.state`; durable on return.

        later: given, this returns when all is copied to the hosts; `later` gets what waits for it
        to be written, and leaves the ranks free for other calls meanwhile.
        """
        await self.begin_save(path)
        if later is None:
            await self.finish_save()
        else:
            later(self._finish_when_written)

    async def _finish_when_written(self) -> None:
        while self._is_saving:
            if all(await self._group.call("has_written")):
                await self.finish_save()
            else:
                await asyncio.sleep(LOOK_S)

    async def begin_save(self, path: Path) -> None:
        """Return when all is copied to the hosts; ranks go on while it is written.

        `path` is a folder that all ranks can write to. What was begun before is finished first.
        """
        if self._is_saving:
            await self.finish_save()
        await self._group.call("begin_save", path)
        self._is_saving = True

    async def finish_save(self) -> None:
        """Return when what was begun is durable; an error of writing it is raised here."""
        if self._is_saving:
            self._is_saving = False
            await self._group.call("finish_save")

    async def load(self, path: Path) -> None:
        """Restore bit for bit what any trainer saved."""
        versions: list[int] = await self._group.call("load", path)
        self._version = versions[0]

    async def place(self, where: Place) -> None:
        """Move weights, gradients and moments to the devices or to the hosts. Idempotent."""
        await self._group.call("place", where)

    async def aclose(self) -> None:
        """End the workers; a checkpoint that is being written stays without its end. Idempotent."""
        await self._group.aclose()


def deal(rows: Sequence[Row], size: int) -> list[list[Row]]:
    """As many parts of the rows, in order, as there are ranks; each of about equally many tokens.

    Raises TrainerError for a row that no trainer can take.
    """
    lengths = np.array(input_lengths(rows), np.int64)
    # A row belongs where its middle lies, so that a cut falls to the nearer side of it.
    middles = np.cumsum(lengths) - lengths / 2
    total = max(int(lengths.sum()), 1)
    places = np.minimum((middles * size / total).astype(int), size - 1)
    return [[row for row, p in zip(rows, places, strict=True) if p == k] for k in range(size)]
