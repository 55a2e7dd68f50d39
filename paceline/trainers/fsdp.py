"""One rank of a trainer that shards its model over several processes (FSDP2).

It lives in a worker process and is called together with the ranks of the others; whoever calls it
splits the rows, so that each rank gets some of them, and puts the results back together. What a
rank does with its rows is what a trainer of one process does (`paceline.trainers.core`).

An error in the midst of work that ranks do together leaves the others waiting for this one: none of
them can go on. Their group ends them, or `timeout_s` does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from paceline.algorithms.base import Objective
from paceline.errors import TrainerError
from paceline.models import ModelConfig, load_tokenizer
from paceline.observe.metrics import Metrics
from paceline.observe.recorder import peak_memory_mib
from paceline.trainers.base import AREAS, FSDPTrainerConfig, Head, Place
from paceline.trainers.core import TrainerCore, add_lora, check_trainable, make_forward, without
from paceline.trainers.forward import Forward
from paceline.trainers.fsdp_parcels import Parcels
from paceline.trainers.fsdp_ranks import Ranks, Seat
from paceline.trainers.fsdp_shards import Root, make_mesh, shard, whole
from paceline.trainers.fsdp_state import Saver, load
from paceline.trainers.fsdp_weights import ModelSource, fill, find_spots, put_rows
from paceline.trainers.lora import Adapters, fill_adapters
from paceline.trainers.optimizer import move_moments
from paceline.trainers.threads import available_cores
from paceline.types import Batch, Row, StepReport
from paceline.weights.base import Meeting, Parcel, Transport

if TYPE_CHECKING:
    from paceline.types import FloatArray

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class FSDPRank:
    """Its methods are those of a trainer, for this rank's rows, and plain calls."""

    def __init__(
        self,
        seat: Seat,
        *,
        config: FSDPTrainerConfig,
        source: ModelSource,
        objective: Objective,
        horizon: int,
        reference: ModelSource | None = None,
        tokenizer: ModelConfig | None = None,
        seed: int = 0,
    ) -> None:
        """horizon: optimizer steps of the whole run. tokenizer: whose is saved with the model.

        seed: of an adapter's first numbers.
        """
        # Threads that wait for a core that another rank spins on would slow all of them down.
        torch.set_num_threads(config.threads or max(1, available_cores() // seat.size))
        self._ranks = Ranks(seat, replicas=config.replicas, timeout_s=config.timeout_s)
        self._is_offloaded = config.cpu_offload
        self._broken: str | None = None
        self._saver: Saver | None = None
        self._parcels: Parcels | None = None
        self._roots: list[Root] = []
        self._adapters: Adapters | None = None
        self._reference: Forward | None = None
        # FSDP computes in the type that it gathers in, so nothing is cast on the way.
        own = config.model_copy(update={"autocast": "off"})
        try:
            self._mesh = make_mesh(self._ranks.device, self._ranks.size, config.replicas)
            has_reference = reference is not None
            trained = self._open(source, config, objective, has_reference=has_reference, seed=seed)
            adapters, frozen = self._adapters, self._reference
            if reference is not None:
                frozen = self._open(reference, config)
            with self._ranks.together("load the tokenizer"):
                is_first = self._ranks.index == 0
                text = load_tokenizer(tokenizer) if tokenizer and is_first else None
            self._core = TrainerCore(
                own,
                objective,
                trained,
                reference=frozen,
                device=self._ranks.device,
                horizon=horizon,
                peers=self._ranks,
                adapters=adapters,
            )
        except BaseException:
            self._ranks.leave()
            raise
        self._settings = {**config.model_dump(mode="json"), "horizon": horizon}
        self._saver = Saver(self._ranks, text, self._settings)
        self._parcels = Parcels(self._core.model, text, self._ranks, address=seat.host)

    def version(self) -> int:
        """Optimizer steps done, skipped ones included."""
        return self._core.version

    def forward(self, rows: list[Row], head: Head) -> list[FloatArray]:
        """What the head says of this rank's rows."""
        if head not in self._core.forwards:
            return self._core.score_rows([], head)  # raises, as it does on every rank
        self._core.refuse_on_host()
        return self._work(lambda: self._core.score_rows(rows, head))

    def forward_backward(self, batch: Batch) -> Metrics:
        """Add the gradients of this rank's rows to those of all; the metrics of these rows."""
        self._core.refuse_on_host()
        metrics = self._work(lambda: self._core.add_gradients(batch))
        metrics.max(f"perf/{AREAS[self._core.trained.head]}_peak_host_mib", peak_memory_mib())
        return metrics

    def optim_step(self) -> StepReport:
        """The same on all ranks."""
        return self._work(self._core.step)

    def place(self, where: Place) -> None:
        """Move weights, gradients, moments and the reference. Nothing moves on a CPU."""
        if self._ranks.device.type != "cpu" and where != self._core.where:
            self._work(lambda: self._move(where))
        self._core.where = where

    def begin_save(self, path: Path) -> None:
        """Copy all to the host, and start to write it into the empty folder `path`."""
        saver = _opened(self._saver)
        self._work(lambda: saver.begin(path, self._core))

    def has_written(self) -> bool:
        """Of what was begun this rank's part is written, so that `finish_save` waits for little."""
        return _opened(self._saver).has_written

    def finish_save(self) -> None:
        """Return when what was begun is on the disk; an error of writing it comes here."""
        saver = _opened(self._saver)
        self._work(saver.finish, leaves=False)

    def load(self, path: Path) -> int:
        """Restore bit for bit what any trainer saved; returns the version."""
        self._work(lambda: load(path, self._core, self._ranks, self._settings), leaves=False)
        return self._core.version

    def open_parcels(
        self,
        version: int,
        transport: Transport,
        bucket_bytes: int,
        folder: Path | None,
        dtype: str | None = None,
    ) -> None:
        """Start a publish; see `paceline.weights.source.Outbox`."""
        parcels = _opened(self._parcels)
        self._work(
            lambda: parcels.open(version, transport, bucket_bytes, folder, dtype), leaves=False
        )

    def next_parcel(self) -> Parcel | None:
        """The next one, with this rank's handle of it if it has one; None after the last."""
        return self._work(_opened(self._parcels).next)

    def close_parcels(self) -> None:
        """End the publish. Idempotent."""
        _opened(self._parcels).close()

    def meeting_point(self) -> tuple[str, int] | None:
        """Of rank 0: address and a port for a new meeting."""
        return _opened(self._parcels).meeting_point()

    def begin_meet(self, meeting: Meeting) -> None:
        """Rank 0 joins; `has_sent` tells when all have."""
        _opened(self._parcels).begin_meet(meeting)

    def begin_broadcast(self) -> None:
        """Rank 0 sends the newest parcel; `has_sent` tells when it has left."""
        _opened(self._parcels).begin_broadcast()

    def has_sent(self, limit_s: float) -> bool:
        """What was begun is done. Waits so long for it; an error of it is raised here."""
        return _opened(self._parcels).has_sent(limit_s)

    def give_up(self) -> None:
        """End a broadcast that nobody receives."""
        _opened(self._parcels).give_up()

    def checksums(self) -> dict[str, str]:
        """Name of each tensor, as a checkpoint names it -> hash; on rank 0."""
        return self._work(_opened(self._parcels).checksums)

    def numbers(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Copies of some of the tensors, on the host; on rank 0."""
        return self._work(lambda: _opened(self._parcels).numbers(names))

    def close(self) -> None:
        """End the threads and leave the group. Idempotent."""
        if self._parcels is not None:
            self._parcels.dispose()
        if self._saver is not None:
            self._saver.close()
        self._ranks.leave()

    def _open(
        self,
        source: ModelSource,
        config: FSDPTrainerConfig,
        objective: Objective | None = None,
        *,
        has_reference: bool = False,
        seed: int = 0,
    ) -> Forward:
        """Shard, fill and try out a model; without an objective it is frozen.

        With an adapter the same model without it becomes the reference.
        """
        adapters = None
        with self._ranks.together("make the model"):
            model = source.blank().eval()
            if objective is None:
                model.requires_grad_(False)
            else:
                adapters = add_lora(
                    model, config, seed=seed, has_reference=has_reference, gather=self._whole
                )
                has_reference = has_reference or adapters is not None
                check_trainable(model, objective, has_reference=has_reference)
            spots = find_spots(model, source.folder)
        root = shard(model, self._mesh, config, self._ranks.device)
        fill(model, spots, source.whole, self._ranks)
        if adapters is not None:
            fill_adapters(model, seed, put_rows)
        self._roots.append(root)
        with torch.no_grad():
            forward: Forward = root(lambda: make_forward(model, config, root))
            if adapters is not None:
                enter = without(adapters, root)
                self._adapters = adapters
                self._reference = root(lambda: make_forward(model, config, enter))
        root.settle()
        return forward

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return whole(tensor, self._ranks.device)

    def _work(self, work: Callable[[], Result], *, leaves: bool = True) -> Result:
        """leaves: an error may be this rank's alone, in the midst of what all do together."""
        if self._broken is not None:
            raise TrainerError(f"this trainer can not go on after an error: {self._broken}")
        try:
            return work()
        except BaseException as error:
            is_ready = all(root.recover() for root in self._roots)
            if leaves and (self._ranks.size > 1 or not is_ready):
                self._broken = f"{type(error).__name__}: {error}"
            raise
        finally:
            if self._broken is None:
                for root in self._roots:
                    root.settle()

    def _move(self, where: Place) -> None:
        target = self._ranks.device if where == "device" else torch.device("cpu")
        if not self._is_offloaded:  # else all is on the host at any time
            for root in self._roots:
                root.to(target)
            move_moments(self._core.optimizer, target)
        if where == "host":
            torch.cuda.empty_cache()


def _opened(part: Result | None) -> Result:
    assert part is not None, "it is there when the rank was made"
    return part
