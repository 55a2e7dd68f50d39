"""A policy: a named model of the run, with what makes its tokens and what changes its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from paceline.algorithms.base import Algorithm, Baselines, Credit
from paceline.data.packing import (
    assign_credit,
    make_batches,
    read_scores,
    take_values,
    with_final_position,
)
from paceline.engines.base import Engine
from paceline.observe.metrics import Metrics
from paceline.teachers.base import Teacher
from paceline.trainers.base import AREAS, Head, Place, Trainer
from paceline.types import Batch, Group, Row
from paceline.weights.base import BUCKET_BYTES, PauseMode, Transport, WeightPlan
from paceline.weights.check import check_weights, reset_weights
from paceline.weights.publish import publish
from paceline.weights.settings import EXACT, WeightCheckConfig


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
    check: WeightCheckConfig = EXACT
    """How and after which publishes the engine's weights are compared with the trainer's."""
    version: int = -1
    critic: Trainer | None = None
    """Learns what the algorithm's `critic` says; there if the algorithm has one."""
    critic_only_steps: int = 0
    """First steps in which the critic learns alone."""
    teacher: Teacher | None = None
    """Grades the rows; there if the algorithm needs one."""
    baselines: Baselines = field(default_factory=dict)
    """Role -> (mean, count) of earlier rewards, for algorithms with a running baseline."""
    bucket_bytes: int = BUCKET_BYTES
    """Of a publish between processes."""
    weight_folder: Path | None = None
    """Of a publish by disk."""
    weight_dtype: str | None = None
    """Type that weights are sent in between processes; None: that of the trainer."""
    takes_turns: bool = False
    """Trainer, critic and teacher are never on the device together."""

    async def learn(
        self, groups: Sequence[Group], *, critic_only: bool = False
    ) -> tuple[Credit, Metrics]:
        """Credit, then every optimizer step that this rollout is worth: the critic's, the actor's.

        What models say of the rollout is computed once, before anything is learned from it; each
        optimizer step has its own denominators. critic_only: the actor stays as it is.
        """
        batches = make_batches(groups, self.name, self.algorithm, self.updates_per_step)
        rows = [row for batch in batches for row in batch.rows]
        num_updates = 0 if critic_only else len(batches) * self.epochs_per_step
        if self.teacher is not None:
            await self._take_turn(self.teacher)
            await self.teacher.grade(rows)
        await self._score(rows, moves_away=num_updates > 1)
        await self._value(rows)
        scores = read_scores(groups, self.name, rows)
        scores.baselines = self.baselines
        credit = self.algorithm.credit(groups, self.name, scores)
        if credit.baselines is not None:
            self.baselines = credit.baselines
        assign_credit(groups, self.name, rows, credit)
        metrics = Metrics()
        metrics.merge(credit.metrics)
        if self.critic is not None:
            metrics.merge(await self._train(self.critic, batches, "values"))
        if not critic_only:
            metrics.merge(await self._train(self.trainer, batches, "policy"))
        return credit, metrics

    async def _score(self, rows: list[Row], *, moves_away: bool) -> None:
        """Log-probs of the reference, and of the weights before the first update.

        Without a second update the latter are the current ones, and cost nothing.
        """
        if self.algorithm.needs_reference:
            await self._take_turn(self.trainer)
            scored = await self.trainer.forward(rows, "reference")
            for row, logprobs_T in zip(rows, scored, strict=True):
                row.reference_logprobs_T = logprobs_T
        is_compared = moves_away and self.algorithm.learns_from_rollouts
        if is_compared or self.algorithm.needs_old_logprobs:
            await self._take_turn(self.trainer)
            scored = await self.trainer.forward(rows, "policy")
            for row, logprobs_T in zip(rows, scored, strict=True):
                row.old_logprobs_T = logprobs_T

    async def _value(self, rows: list[Row]) -> None:
        """What the critic expects before each token, and at the end if the algorithm asks."""
        if self.critic is None:
            return
        states = rows
        if self.algorithm.needs_final_values:
            states = [with_final_position(row) for row in rows]
        await self._take_turn(self.critic)
        for row, values_T in zip(rows, await self.critic.forward(states, "values"), strict=True):
            take_values(row, values_T)

    async def _train(self, trainer: Trainer, batches: list[Batch], head: Head) -> Metrics:
        await self._take_turn(trainer)
        metrics, area = Metrics(), AREAS[head]
        for _ in range(self.epochs_per_step):
            for batch in batches:
                metrics.merge(await trainer.forward_backward(batch))
                report = await trainer.optim_step()
                metrics.mean(f"{area}/grad_norm", report.grad_norm)
                metrics.mean(f"{area}/lr", report.lr)
                metrics.sum(f"{area}/skipped_updates", report.is_skipped)
                if report.adapter_norm is not None:
                    metrics.mean("train/adapter_norm", report.adapter_norm)
        return metrics

    async def place(self, where: Place) -> None:
        """Move to the host what trains, or to the device what works first when it learns."""
        if where == "host":
            for one in self._movable:
                await one.place("host")
        else:
            is_scored = self.algorithm.needs_reference or self.algorithm.needs_old_logprobs
            first = self.trainer if self.critic is None or is_scored else self.critic
            await self._bring(self.teacher or first)

    @property
    def _movable(self) -> list[Trainer | Teacher]:
        """All that works when the policy learns."""
        found = (self.trainer, self.critic, self.teacher)
        return [one for one in found if one is not None]

    async def _take_turn(self, one: Trainer | Teacher) -> None:
        """Bring one of them to the device, after the others have left."""
        if self.takes_turns and len(self._movable) > 1:
            await self._bring(one)

    async def _bring(self, one: Trainer | Teacher) -> None:
        for other in self._movable:
            if other is not one:
                await other.place("host")
        await one.place("device")

    async def publish(self) -> None:
        """Bring the engines to the trainer's version; on failure none serves it.

        Done even where the version is served already: engines forget what they have cached, so
        that a resumed run computes the same bits.
        """
        plan = WeightPlan(
            self.name,
            self.trainer.version,
            self.transport,
            bucket_bytes=self.bucket_bytes,
            folder=self.weight_folder,
            dtype=self.weight_dtype,
        )
        is_first = self.version < 0
        check = self.check
        is_checked = check.when == "always" or (check.when == "first" and is_first)
        sent = await publish(
            self.trainer,
            {"engine": self.engine},
            plan,
            pause=self.pause,
            reset=partial(reset_weights, check=check) if is_checked and check.reset else None,
            verify=partial(check_weights, check=check) if is_checked else None,
        )
        self.version = sent.version
