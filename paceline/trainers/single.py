"""The trainer of one process and one device: any transformers causal LM, on a CPU or a GPU.

It trains a policy, or a critic if its model is a `ValueModel`. The work runs in a thread of its
own, so that the event loop goes on; a cancelled call ends at the next micro-batch, and returns only
when the thread is idle again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.algorithms.base import Objective
from paceline.errors import TrainerError
from paceline.models import write_model_files
from paceline.observe.metrics import Metrics
from paceline.trainers.background import WorkThread, in_thread
from paceline.trainers.base import Head, Later, Place, SingleTrainerConfig
from paceline.trainers.core import TrainerCore, add_lora, check_trainable, make_forward, without
from paceline.trainers.devices import resolve_device
from paceline.trainers.optimizer import move_moments
from paceline.trainers.state import HeldState, hold_state, load_state, save_state
from paceline.trainers.values import ValueModel
from paceline.types import Batch, Row, StepReport
from paceline.weights.adapters import merged_tensors
from paceline.weights.base import WeightPlan
from paceline.weights.naming import as_checkpoint, own_tensors
from paceline.weights.source import LocalSource, Outbox
from paceline.weights.tensors import named_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.types import FloatArray


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
        address: str = "127.0.0.1",
        seed: int = 0,
    ) -> None:
        """horizon: optimizer steps of the whole run, for the schedule. reference: frozen here;
        with `config.lora` it is the model without its adapter, and none is given.

        address: of this machine, as engines of other processes reach it for new weights. seed: of
        an adapter's first numbers. The model is moved to the device and trained in place: with
        `config.lora` it gets an adapter, and keeps its weights.
        """
        self._device = resolve_device(config.device)
        if reference is model:
            raise TrainerError("the reference is the trained model itself: give a copy of it")
        adapters = add_lora(model, config, seed=seed, has_reference=reference is not None)
        has_reference = reference is not None or adapters is not None
        check_trainable(model, objective, has_reference=has_reference)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._tokenizer = tokenizer
        self._settings = {**config.model_dump(mode="json"), "horizon": horizon}
        # Evaluation mode: dropout would make log-probs random and ratios differ from 1.
        trained = make_forward(model.to(self._device).eval(), config)
        frozen = None
        if adapters is not None:
            frozen = make_forward(model, config, without(adapters))
        elif reference is not None:
            frozen = make_forward(reference.to(self._device).eval().requires_grad_(False), config)
        self._thread = WorkThread("trainer")
        self._core = TrainerCore(
            config,
            objective,
            trained,
            reference=frozen,
            device=self._device,
            horizon=horizon,
            check=self._thread.check,
            adapters=adapters,
        )
        self._outbox = Outbox(
            lambda: as_checkpoint(
                model, merged_tensors(model, own_tensors(model), torch.Tensor.detach)
            ),
            write_config=lambda folder: write_model_files(model, tokenizer, folder),
            address=address,
            device=self._device,
        )

    @property
    def version(self) -> int:
        """Optimizer steps done, skipped ones included, so that it always rises."""
        return self._core.version

    async def forward(self, rows: list[Row], head: Head) -> list[FloatArray]:
        """Log-probs of the rows' trained tokens, or a critic's values of them. No gradient."""
        return await self._thread.run(lambda: self._core.score_rows(rows, head))

    async def forward_backward(self, batch: Batch) -> Metrics:
        """Add the gradients of all micro-batches of one optimizer step."""
        return await self._thread.run(lambda: self._core.add_gradients(batch))

    async def optim_step(self) -> StepReport:
        """Clip, step, advance the schedule. A non-finite loss or gradient leaves all untouched."""
        return await self._thread.run(self._core.step)

    async def send(self, plan: WeightPlan) -> WeightPlan:
        """The plan with this trainer's own tensors, or with the source that hands them out."""
        if plan.transport in ("shared", "copy"):
            return replace(plan, tensors=named_tensors(self._core.model))
        return replace(plan, source=LocalSource(self._outbox, plan, self._thread.run))

    async def save(self, path: Path, later: Later | None = None) -> None:
        """Write the folder described in `paceline.trainers.state`; durable on return.

        later: given, this returns when all is copied; `later` gets what writes the copies, in a
        thread of its own.
        """

        def write(held: HeldState) -> None:
            core = self._core
            save_state(path, core.model, self._tokenizer, held, self._settings, core.adapters)

        if later is None:
            await self._thread.run(lambda: write(self._hold(copies=False)))
            return
        held = await self._thread.run(lambda: self._hold(copies=True))
        later(lambda: in_thread("checkpoint", lambda: write(held)))

    async def load(self, path: Path) -> None:
        """Restore bit for bit what `save` wrote; a folder of another model is refused."""
        core = self._core
        await self._thread.run(
            lambda: core.restore(
                load_state(path, core.model, core.optimizer, self._settings, core.adapters)
            )
        )

    async def place(self, where: Place) -> None:
        """Move weights, gradients, moments and the reference. Nothing moves on a CPU."""
        if self._device.type != "cpu" and where != self._core.where:
            await self._thread.run(lambda: self._move(where))
        self._core.where = where

    async def aclose(self) -> None:
        """End the trainer's thread, and what its publishes left. Idempotent."""
        self._outbox.abort()
        self._thread.close()
        self._outbox.dispose()

    def _hold(self, *, copies: bool) -> HeldState:
        core = self._core
        return hold_state(core.model, core.optimizer, core.counters, core.adapters, copies=copies)

    def _move(self, where: Place) -> None:
        target = self._device if where == "device" else torch.device("cpu")
        for forward in self._core.forwards.values():
            forward.model.to(target)
        move_moments(self._core.optimizer, target)
        if where == "host":
            torch.cuda.empty_cache()
