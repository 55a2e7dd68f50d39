"""What every trainer does in each of its processes: score rows, add gradients, step.

It trains a policy, or a critic if its model is a `ValueModel`: same code, another forward. Weights
may be whole, or this process's shards of them; whoever holds them has them gathered in the forward.

The loss of an optimizer step is a sum over trained tokens: their weights already hold the one
denominator. So gradients of micro-batches and of processes are added and never rescaled.

Processes that train together compute equally many micro-batches, since each takes part in what the
others gather and reduce: one that runs out goes on with fillers, whose gradient is zero.

Legend: N trained tokens of a micro-batch, T tokens of a row.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.algorithms.base import Objective
from paceline.errors import ConfigError, TrainerError
from paceline.observe.metrics import Metrics
from paceline.trainers.base import AREAS, Head, Place, TrainerConfig
from paceline.trainers.compiled import CompiledLayers
from paceline.trainers.devices import fixed_order
from paceline.trainers.forward import CausalForward, Enter, Forward, Result, directly
from paceline.trainers.inputs import check_columns
from paceline.trainers.layout import MicroBatch, filler, make_micro_batches, plan_rows
from paceline.trainers.lora import Adapters, add_adapters
from paceline.trainers.optimizer import (
    clip_gradients,
    gradient_norm,
    local,
    make_optimizer,
)
from paceline.trainers.peers import Alone, Peers
from paceline.trainers.recompute import decoder_layers, recomputed
from paceline.trainers.schedules import learning_rate
from paceline.trainers.tally import Tally
from paceline.trainers.values import ValueForward, ValueModel
from paceline.types import Batch, Row, StepReport
from paceline.weights.adapters import Gather

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from paceline.types import FloatArray

logger = logging.getLogger(__name__)


def go_on() -> None:
    """The check of work that nobody interrupts."""


class TrainerCore:
    """One process's part of a trainer, without threads, files or devices to move between."""

    def __init__(
        self,
        config: TrainerConfig,
        objective: Objective,
        trained: Forward,
        *,
        reference: Forward | None = None,
        device: torch.device,
        horizon: int,
        peers: Peers | None = None,
        check: Callable[[], None] = go_on,
        adapters: Adapters | None = None,
    ) -> None:
        """horizon: optimizer steps of the whole run, for the schedule. check: called between
        micro-batches; raises if the work is to end. adapters: of the model, if they are what is
        trained."""
        self._config = config
        self._objective = objective
        self._device = device
        self._horizon = horizon
        self._peers: Peers = peers or Alone()
        self._check = check
        self.adapters = adapters
        self.model: Any = trained.model
        self.trained = trained
        self.forwards: dict[Head, Forward] = {trained.head: trained}
        if reference is not None:
            self.forwards["reference"] = reference
        self._layers = decoder_layers(self.model) if config.activation_checkpointing else []
        self._compiled: CompiledLayers | None = None
        if config.compile and device.type == "cuda":
            models = {id(one.model): one.model for one in self.forwards.values()}
            self._compiled = CompiledLayers(list(models.values()))
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.model, config)
        self.version = 0
        """Optimizer steps done, skipped ones included, so that it always rises."""
        self._num_updates = 0
        self._is_finite = True
        """Every loss since the last optimizer step was, as far as this process knows."""
        self.where: Place = "device"

    @property
    def counters(self) -> dict[str, int]:
        """What a checkpoint keeps besides weights and moments."""
        return {"version": self.version, "updates": self._num_updates}

    def restore(self, counters: Mapping[str, int]) -> None:
        """Go on from there; weights and moments are back already."""
        self.optimizer.zero_grad()
        self.version, self._num_updates = counters["version"], counters["updates"]

    def score_rows(self, rows: Sequence[Row], head: Head) -> list[FloatArray]:
        """Per row, what the head says of its trained tokens, and 0.0 elsewhere. No gradient."""
        if head not in self.forwards:
            raise TrainerError(
                f"this trainer has no {head!r} to score with: it was built without one"
            )
        forward = self.forwards[head]
        kind = np.float64 if self.parameters[0].dtype == torch.float64 else np.float32
        scored: list[FloatArray] = [np.zeros(len(row.tokens_T), kind) for row in rows]
        with torch.no_grad():
            for micro in self._micro_batches(rows, forward):
                with self._forward_context(learns=False):
                    scores_N = forward.score(micro)
                chosen = [rows[i].mask_T for i in micro.rows]
                ends = np.cumsum([int(mask_T.sum()) for mask_T in chosen])
                parts = np.split(scores_N.cpu().numpy(), ends[:-1])
                for i, mask_T, part in zip(micro.rows, chosen, parts, strict=False):
                    scored[i][mask_T] = part
        return scored

    def add_gradients(self, batch: Batch) -> Metrics:
        """Add those of all micro-batches of one optimizer step; metrics of this process's rows."""
        forward = self.trained
        check_columns(batch.rows, self._objective, forward.head)
        tally = Tally()
        tally.part("loss", torch.zeros((), device=self._device))
        fixed = self._config.deterministic and self._device.type != "cpu"
        try:
            with fixed_order() if fixed else nullcontext():
                self._add_batch(batch.rows, tally)
        except BaseException:
            self.optimizer.zero_grad()  # half a step's gradients would be added to the next one
            raise
        area = AREAS[forward.head]
        is_first = self._peers.index == 0
        # A loss is a sum over processes, and one value an optimizer step: the first one counts it.
        metrics = tally.metrics(area, weight=float(is_first))
        # A loss may be lost where its gradient is not: clipping a number that is none gives zero.
        self._is_finite &= math.isfinite(metrics[f"{area}/loss"].total)
        num_trained = batch.num_trained_tokens
        is_empty = self._peers.most(num_trained) == 0
        metrics.sum(f"{area}/trained_tokens", num_trained)
        metrics.sum(f"{area}/empty_batches", is_empty and is_first)
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device) / 2**20
            metrics.max(f"perf/{area}_peak_device_mib", peak)
        return metrics

    def step(self) -> StepReport:
        """Clip, step, advance the schedule. A non-finite loss or gradient leaves all untouched."""
        if all(p.grad is None for p in self.parameters):
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [local(p.grad) for p in self.parameters if p.grad is not None]
        norm = self._peers.norm(gradient_norm(gradients))
        lr = self._next_lr()
        self.version += 1
        is_finite = self._peers.all_true(math.isfinite(norm) and self._is_finite)
        self._is_finite = True
        if is_finite:
            clip_gradients(gradients, norm, self._config.max_grad_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self._num_updates += 1
        elif self._peers.index == 0:
            logger.warning("version %d: loss or gradient is not finite, step skipped", self.version)
        self.optimizer.zero_grad()
        return StepReport(
            self.version,
            lr=lr,
            grad_norm=norm,
            is_skipped=not is_finite,
            adapter_norm=None if self.adapters is None else self.adapters.norm(),
        )

    def _add_batch(self, rows: Sequence[Row], tally: Tally) -> None:
        if not self._objective.learns_by_advantage_alone:
            self._add_rows(rows, tally, learns=True)
            return
        learning, idle = split_idle(rows)
        self._add_rows(learning, tally, learns=True)
        odd = self._add_rows(idle, tally, learns=False)
        self._add_rows(odd, tally, learns=True)

    def _add_rows(self, rows: Sequence[Row], tally: Tally, *, learns: bool) -> list[Row]:
        """Returns the rows of micro-batches without a gradient whose loss is not finite.

        They are not counted yet: the loss must reach the gradient, upon which the optimizer step
        is skipped.
        """
        odd: list[Row] = []
        for micro in self._micro_batches(rows, self.trained):
            if not micro.rows:
                self._add_filler(micro, learns=learns)
            elif not self._add_micro_batch(rows, micro, tally, learns=learns):
                odd += [rows[i] for i in micro.rows]
        return odd

    def _add_micro_batch(
        self, rows: Sequence[Row], micro: MicroBatch, tally: Tally, *, learns: bool
    ) -> bool:
        """False if the loss is not finite where it has no gradient; it is not counted then."""
        with self._forward_context(learns):
            inputs = self.trained.loss_inputs(
                [rows[i] for i in micro.rows],
                micro,
                entropy_gradient=self._objective.needs_entropy_gradient,
            )
        output = self._objective.loss(inputs)
        if learns:
            output.loss.backward()  # type: ignore[no-untyped-call]
        elif not output.loss.isfinite():
            return False
        tally.part("loss", output.loss.detach())
        for name, (total, weight) in output.means.items():
            tally.mean(name, total, weight)
        if self.trained.head == "policy" and self._objective.learns_from_rollouts:
            gap_N = inputs.old_logprobs_N - inputs.behaviour_logprobs_N
            tally.max("mismatch_max", gap_N.detach().abs().max())
        return True

    def _add_filler(self, micro: MicroBatch, *, learns: bool) -> None:
        """Zeros, while other processes have a micro-batch left."""
        with self._forward_context(learns):
            nothing = self.trained.score(micro).sum() * 0.0
        if learns:
            nothing.backward()  # type: ignore[no-untyped-call]

    def _forward_context(self, learns: bool) -> ExitStack:
        with ExitStack() as stack:
            stack.enter_context(self._autocast())
            if not learns:
                stack.enter_context(torch.no_grad())
            if self._compiled is not None:
                stack.enter_context(self._compiled.active())
            if self._layers and learns:
                stack.enter_context(recomputed(self._layers))
            return stack.pop_all()

    def _micro_batches(self, rows: Sequence[Row], forward: Forward) -> Iterator[MicroBatch]:
        """As many as the process with most of them has: fillers, which have no rows, at the end."""
        self.refuse_on_host()
        plan = plan_rows(rows, forward, self._config.max_tokens_per_micro_batch)
        num_fillers = self._peers.most(len(plan)) - len(plan)
        for micro in make_micro_batches(rows, plan, forward.layout, self._device):
            self._check()
            yield micro
        for _ in range(num_fillers):
            self._check()
            yield filler(forward.layout, self._device)

    def refuse_on_host(self) -> None:
        """Raise TrainerError if the weights are not where they can be worked with."""
        if self.where == "host" and self._device.type != "cpu":
            raise TrainerError('the trainer is on the host: call place("device") first')

    def _autocast(self) -> AbstractContextManager[object]:
        if self._config.autocast == "off":
            return nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)

    def _next_lr(self) -> float:
        return learning_rate(
            self._num_updates,
            peak=self._config.lr,
            shape=self._config.lr_schedule,
            warmup=self._config.lr_warmup_steps,
            horizon=self._horizon,
            min_ratio=self._config.min_lr_ratio,
        )


def split_idle(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Rows that have a gradient; and those without, of which metrics alone are wanted.

    For objectives that learn by the advantage alone. One row always counts among the first, so that
    parameters have gradients, if only zeros.
    """
    learning = [bool(np.any(r.advantages_T * r.weights_T, where=r.mask_T)) for r in rows]
    if learning and not any(learning):
        learning[0] = True
    return (
        [row for row, learns in zip(rows, learning, strict=True) if learns],
        [row for row, learns in zip(rows, learning, strict=True) if not learns],
    )


def check_trainable(model: nn.Module, objective: Objective, *, has_reference: bool) -> None:
    """Raises ConfigError or TrainerError for a model that can not learn this objective."""
    kinds = {p.dtype for p in model.parameters() if p.requires_grad}
    if not kinds:
        raise TrainerError("the model has no parameter that requires a gradient")
    if torch.float16 in kinds:
        raise ConfigError(
            'model.dtype = "float16" can not be trained: AdamW\'s second moments underflow in it; '
            'use "float32" (with trainer.autocast = "bfloat16" for speed) or "bfloat16"'
        )
    if objective.needs_reference and not has_reference:
        raise TrainerError("the algorithm needs a reference model and none was given")


def make_forward(
    model: PreTrainedModel | ValueModel, config: TrainerConfig, enter: Enter = directly
) -> Forward:
    """enter: runs the path through the model; see `paceline.trainers.forward`."""
    if isinstance(model, ValueModel):
        return ValueForward(
            model, layout=config.layout, share_prefix=config.share_prefix, enter=enter
        )
    return CausalForward(
        model,
        layout=config.layout,
        chunk_tokens=config.logprob_chunk_tokens,
        share_prefix=config.share_prefix,
        fused=config.compile and model.device.type == "cuda",
        enter=enter,
    )


def add_lora(
    model: PreTrainedModel | ValueModel,
    config: TrainerConfig,
    *,
    seed: int,
    has_reference: bool = False,
    gather: Gather = torch.Tensor.detach,
) -> Adapters | None:
    """The adapter that the settings ask for, put into the model in place; None if they do not."""
    if config.lora is None:
        return None
    if isinstance(model, ValueModel):
        raise TrainerError("a critic has no adapter: it learns with all its weights")
    if has_reference:
        raise TrainerError(
            "with an adapter the reference is the model without it: give no other one"
        )
    return add_adapters(model, config.lora, seed=seed, gather=gather)


def without(adapters: Adapters, enter: Enter = directly) -> Enter:
    """Runs paths through the model as it is without its adapter. enter: for the path itself."""

    def run(path: Callable[[], Result]) -> Result:
        with adapters.off():
            return enter(path)

    return run
