"""The trainer of one process and one device: any transformers causal LM, on a CPU or a GPU.

It trains a policy, or a critic if its model is a `ValueModel`: same code, another forward. The
work runs in a thread of its own, so that the event loop goes on; a cancelled call ends at the next
micro-batch, and returns only when the thread is idle again.

The loss of an optimizer step is a sum over trained tokens: their weights already hold the one
denominator. So gradients of micro-batches are added and never rescaled.

Legend: N trained tokens of a micro-batch, T tokens of a row.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.algorithms.base import Objective
from paceline.errors import ConfigError, TrainerError
from paceline.observe.metrics import Metrics
from paceline.trainers.background import WorkThread
from paceline.trainers.base import AREAS, Head, Place, SingleTrainerConfig
from paceline.trainers.devices import fixed_order, resolve_device
from paceline.trainers.forward import CausalForward, Forward
from paceline.trainers.inputs import check_columns
from paceline.trainers.layout import MicroBatch, micro_batches
from paceline.trainers.optimizer import (
    clip_gradients,
    gradient_norm,
    make_optimizer,
    move_moments,
)
from paceline.trainers.recompute import decoder_layers, recomputed
from paceline.trainers.schedules import learning_rate
from paceline.trainers.state import load_state, save_state
from paceline.trainers.tally import Tally
from paceline.trainers.values import ValueForward, ValueModel
from paceline.types import Batch, Row, StepReport
from paceline.weights.base import WeightPlan
from paceline.weights.tensors import named_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.types import FloatArray

logger = logging.getLogger(__name__)


class SingleTrainer:
    """Implements `paceline.trainers.base.Trainer`."""

    def __init__(
        self,
        config: SingleTrainerConfig,
        model: PreTrainedModel | ValueModel,
        tokenizer: PreTrainedTokenizerBase | None,
        objective: Objective,
        *,
        horizon: int,
        reference: PreTrainedModel | None = None,
    ) -> None:
        """horizon: optimizer steps of the whole run, for the schedule. reference: frozen here.

        The model is moved to the device and trained in place.
        """
        self._device = resolve_device(config.device)
        _check(model, objective, reference)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._config = config
        self._objective = objective
        self._tokenizer = tokenizer
        self._horizon = horizon
        # Evaluation mode: dropout would make log-probs random and ratios differ from 1.
        self._model: PreTrainedModel | ValueModel = model.to(self._device).eval()
        self._trained_forward = _make_forward(self._model, config)
        self._forwards: dict[Head, Forward] = {self._trained_forward.head: self._trained_forward}
        if reference is not None:
            frozen = reference.to(self._device).eval().requires_grad_(False)
            self._forwards["reference"] = _make_forward(frozen, config)
        self._layers = decoder_layers(model) if config.activation_checkpointing else []
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = make_optimizer(model, config)
        self._version = self._num_updates = 0
        self._is_finite = True
        """Every loss since the last optimizer step was."""
        self._where: Place = "device"
        self._thread = WorkThread("trainer")

    @property
    def version(self) -> int:
        """Optimizer steps done, skipped ones included, so that it always rises."""
        return self._version

    async def forward(self, rows: list[Row], head: Head) -> list[FloatArray]:
        """Log-probs of the rows' trained tokens, or a critic's values of them. No gradient."""
        return await self._thread.run(lambda: self._score_rows(rows, head))

    async def forward_backward(self, batch: Batch) -> Metrics:
        """Add the gradients of all micro-batches of one optimizer step."""
        return await self._thread.run(lambda: self._add_gradients(batch))

    async def optim_step(self) -> StepReport:
        """Clip, step, advance the schedule. A non-finite loss or gradient leaves all untouched."""
        return await self._thread.run(self._step)

    async def send(self, plan: WeightPlan) -> WeightPlan:
        """The plan with this trainer's own tensors: receivers share or copy them."""
        return replace(plan, tensors=named_tensors(self._model))

    async def save(self, path: Path) -> None:
        """Write the folder described in `paceline.trainers.state`; durable on return."""
        counters = {"version": self._version, "updates": self._num_updates}
        await self._thread.run(
            lambda: save_state(
                path, self._model, self._tokenizer, self._optimizer, counters, self._settings
            )
        )

    async def load(self, path: Path) -> None:
        """Restore bit for bit what `save` wrote; a folder of another model is refused."""

        def load() -> None:
            counters = load_state(path, self._model, self._optimizer, self._settings)
            self._optimizer.zero_grad()
            self._version, self._num_updates = counters["version"], counters["updates"]

        await self._thread.run(load)

    async def place(self, where: Place) -> None:
        """Move weights, gradients, moments and the reference. Nothing moves on a CPU."""
        if self._device.type != "cpu" and where != self._where:
            await self._thread.run(lambda: self._move(where))
        self._where = where

    async def aclose(self) -> None:
        """End the trainer's thread. Idempotent."""
        self._thread.close()

    @property
    def _settings(self) -> dict[str, object]:
        return {**self._config.model_dump(mode="json"), "horizon": self._horizon}

    def _score_rows(self, rows: list[Row], head: Head) -> list[FloatArray]:
        if head not in self._forwards:
            raise TrainerError(
                f"this trainer has no {head!r} to score with: it was built without one"
            )
        forward = self._forwards[head]
        kind = np.float64 if self._trained[0].dtype == torch.float64 else np.float32
        scored: list[FloatArray] = [np.zeros(len(row.tokens_T), kind) for row in rows]
        with torch.no_grad():
            for micro in self._micro_batches(rows, forward):
                with self._autocast():
                    scores_N = forward.score(micro)
                chosen = [rows[i].mask_T for i in micro.rows]
                ends = np.cumsum([int(mask_T.sum()) for mask_T in chosen])
                parts = np.split(scores_N.cpu().numpy(), ends[:-1])
                for i, mask_T, part in zip(micro.rows, chosen, parts, strict=True):
                    scored[i][mask_T] = part
        return scored

    def _add_gradients(self, batch: Batch) -> Metrics:
        forward = self._trained_forward
        check_columns(batch.rows, self._objective, forward.head)
        tally = Tally()
        tally.part("loss", torch.zeros((), device=self._device))
        fixed = self._config.deterministic and self._device.type != "cpu"
        try:
            with fixed_order() if fixed else nullcontext():
                for rows, learns in self._split(batch.rows):
                    for micro in self._micro_batches(rows, forward):
                        self._add_micro_batch(rows, micro, tally, learns=learns)
        except BaseException:
            self._optimizer.zero_grad()  # half a step's gradients would be added to the next one
            raise
        area = AREAS[forward.head]
        metrics = tally.metrics(area)
        # A loss may be lost where its gradient is not: clipping a number that is none gives zero.
        self._is_finite &= math.isfinite(metrics[f"{area}/loss"].total)
        num_trained = batch.num_trained_tokens
        metrics.sum(f"{area}/trained_tokens", num_trained)
        metrics.sum(f"{area}/empty_batches", num_trained == 0)
        return metrics

    def _split(self, rows: Sequence[Row]) -> Iterator[tuple[Sequence[Row], bool]]:
        """Rows that have a gradient; and those without, of which metrics alone are wanted.

        One row always counts among the first, so that parameters have gradients, if only zeros.
        """
        if not self._objective.learns_by_advantage_alone:
            yield rows, True
            return
        learning = [bool(np.any(r.advantages_T * r.weights_T, where=r.mask_T)) for r in rows]
        if learning and not any(learning):
            learning[0] = True
        yield [row for row, learns in zip(rows, learning, strict=True) if learns], True
        yield [row for row, learns in zip(rows, learning, strict=True) if not learns], False

    def _add_micro_batch(
        self, rows: Sequence[Row], micro: MicroBatch, tally: Tally, *, learns: bool
    ) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._autocast())
            if not learns:
                stack.enter_context(torch.no_grad())
            if self._layers:
                stack.enter_context(recomputed(self._layers))
            inputs = self._trained_forward.loss_inputs(
                [rows[i] for i in micro.rows],
                micro,
                entropy_gradient=self._objective.needs_entropy_gradient,
            )
        output = self._objective.loss(inputs)
        if learns:
            output.loss.backward()  # type: ignore[no-untyped-call]
        elif not output.loss.isfinite():
            # It must reach the gradient, upon which the optimizer step is skipped.
            self._add_micro_batch(rows, micro, tally, learns=True)
            return
        tally.part("loss", output.loss.detach())
        for name, (total, weight) in output.means.items():
            tally.mean(name, total, weight)
        if self._trained_forward.head == "policy" and self._objective.learns_from_rollouts:
            gap_N = inputs.old_logprobs_N - inputs.behaviour_logprobs_N
            tally.max("mismatch_max", gap_N.detach().abs().max())

    def _micro_batches(self, rows: Sequence[Row], forward: Forward) -> Iterator[MicroBatch]:
        if self._where == "host" and self._device.type != "cpu":
            raise TrainerError('the trainer is on the host: call place("device") first')
        budget = self._config.max_tokens_per_micro_batch
        for micro in micro_batches(rows, forward, budget, self._device):
            self._thread.check()
            yield micro

    def _autocast(self) -> AbstractContextManager[object]:
        if self._config.autocast == "off":
            return nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)

    def _step(self) -> StepReport:
        if all(p.grad is None for p in self._trained):
            for parameter in self._trained:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in self._trained if p.grad is not None]
        norm = gradient_norm(gradients)
        lr = self._next_lr()
        self._version += 1
        is_finite = math.isfinite(norm) and self._is_finite
        self._is_finite = True
        if is_finite:
            clip_gradients(gradients, norm, self._config.max_grad_norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._num_updates += 1
        else:
            logger.warning(
                "version %d: loss or gradient is not finite, step skipped", self._version
            )
        self._optimizer.zero_grad()
        return StepReport(self._version, lr=lr, grad_norm=norm, is_skipped=not is_finite)

    def _next_lr(self) -> float:
        return learning_rate(
            self._num_updates,
            peak=self._config.lr,
            shape=self._config.lr_schedule,
            warmup=self._config.lr_warmup_steps,
            horizon=self._horizon,
            min_ratio=self._config.min_lr_ratio,
        )

    def _move(self, where: Place) -> None:
        target = self._device if where == "device" else torch.device("cpu")
        for forward in self._forwards.values():
            forward.model.to(target)
        move_moments(self._optimizer, target)
        if where == "host":
            torch.cuda.empty_cache()


def _make_forward(model: PreTrainedModel | ValueModel, config: SingleTrainerConfig) -> Forward:
    if isinstance(model, ValueModel):
        return ValueForward(model, layout=config.layout, share_prefix=config.share_prefix)
    return CausalForward(
        model,
        layout=config.layout,
        chunk_tokens=config.logprob_chunk_tokens,
        share_prefix=config.share_prefix,
    )


def _check(
    model: PreTrainedModel | ValueModel, objective: Objective, reference: PreTrainedModel | None
) -> None:
    kinds = {p.dtype for p in model.parameters() if p.requires_grad}
    if not kinds:
        raise TrainerError("the model has no parameter that requires a gradient")
    if torch.float16 in kinds:
        raise ConfigError(
            'model.dtype = "float16" can not be trained: AdamW\'s second moments underflow in it; '
            'use "float32" (with trainer.autocast = "bfloat16" for speed) or "bfloat16"'
        )
    if reference is model:
        raise TrainerError("the reference is the trained model itself: give a copy of it")
    if objective.needs_reference and reference is None:
        raise TrainerError("the algorithm needs a reference model and none was given")
