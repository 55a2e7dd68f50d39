"""A policy: a named model of the run, with what makes its tokens and what changes its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.algorithms.base import Algorithm, Credit
from paceline.data.packing import assign_credit, make_batches, read_scores
from paceline.engines.base import Engine
from paceline.observe.metrics import Metrics
from paceline.trainers.base import Trainer
from paceline.types import Batch, Group, Row
from paceline.weights.base import PauseMode, Transport, WeightPlan
from paceline.weights.publish import publish


@dataclass(slots=True)
class Policy:
    """One model that learns. `version` is what its engines serve; the trainer may be ahead."""

    name: str
    algorithm: Algorithm
    engine: Engine
    trainer: Trainer
    transport: Transport
    updates_per_step: int = 1
    epochs_per_step: int = 1
    pause: PauseMode = "finish"
    version: int = -1

    async def learn(self, groups: Sequence[Group]) -> tuple[Credit, Metrics]:
        """Credit, then every optimizer step that this rollout is worth.

        The reference, and the old log-probs where the weights move away from them, are computed
        once for the whole rollout; each optimizer step has its own denominators.
        """
        batches = make_batches(groups, self.name, self.algorithm, self.updates_per_step)
        rows = [row for batch in batches for row in batch.rows]
        await self._score(rows, moves_away=len(batches) * self.epochs_per_step > 1)
        credit = self.algorithm.credit(groups, self.name, read_scores(groups, self.name, rows))
        assign_credit(groups, self.name, rows, credit)
        metrics = Metrics()
        metrics.merge(credit.metrics)
        for _ in range(self.epochs_per_step):
            for batch in batches:
                metrics.merge(await self._update(batch))
        return credit, metrics

    async def _score(self, rows: list[Row], *, moves_away: bool) -> None:
        """Without a second update the old log-probs are the current ones, and cost nothing."""
        if self.algorithm.needs_reference:
            for row, logprobs_T in zip(
                rows, await self.trainer.forward(rows, "reference"), strict=True
            ):
                row.reference_logprobs_T = logprobs_T
        if moves_away and self.algorithm.learns_from_rollouts:
            for row, logprobs_T in zip(
                rows, await self.trainer.forward(rows, "policy"), strict=True
            ):
                row.old_logprobs_T = logprobs_T

    async def _update(self, batch: Batch) -> Metrics:
        metrics = await self.trainer.forward_backward(batch)
        report = await self.trainer.optim_step()
        metrics.mean("train/grad_norm", report.grad_norm)
        metrics.mean("train/lr", report.lr)
        metrics.sum("train/skipped_updates", report.is_skipped)
        return metrics

    async def publish(self) -> None:
        """Bring the engines to the trainer's version; on failure none serves it."""
        plan = WeightPlan(self.name, self.trainer.version, self.transport)
        sent = await publish(self.trainer, {"engine": self.engine}, plan, pause=self.pause)
        self.version = sent.version
