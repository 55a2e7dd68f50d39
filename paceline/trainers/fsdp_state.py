"""A checkpoint of a sharded trainer: the folder of `paceline.trainers.state`, written together.

Rank 0 gathers and writes the model. Moments are gathered one by one, each by the rank that writes
it. All is copied to the host first, so that writing needs no rank's turn and no device: it goes on
in a thread while the trainer does.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch

from paceline.errors import TrainerError
from paceline.models import writable
from paceline.observe.files import REAL_FILES
from paceline.trainers.core import TrainerCore
from paceline.trainers.fsdp_ranks import Ranks
from paceline.trainers.fsdp_shards import own_rows, whole
from paceline.trainers.fsdp_weights import fill, find_spots, put_rows
from paceline.trainers.lora import ADAPTER_FOLDER
from paceline.trainers.optimizer import MOMENTS, check_moments, local
from paceline.trainers.state import (
    MODEL_FOLDER,
    fingerprint_of,
    optimizer_file,
    optimizer_files,
    read_state,
    readable,
    report_changes,
    restore_saved,
    sync_tree,
    write_model,
    write_state,
)
from paceline.weights.adapters import merged_tensors
from paceline.weights.tensors import named_tensors

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


class Saver:
    """Writes one checkpoint at a time."""

    def __init__(
        self, ranks: Ranks, tokenizer: PreTrainedTokenizerBase | None, settings: dict[str, Any]
    ) -> None:
        self._ranks = ranks
        self._tokenizer = tokenizer
        self._settings = settings
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None
        self._finish: Any = None

    def begin(self, path: Path, core: TrainerCore) -> None:
        """Copy all to the host and start to write it. What was begun before must be finished."""
        if self._written is not None:
            raise TrainerError("a checkpoint is being written: finish it first")
        model = core.model
        fingerprint, counters = fingerprint_of(model, core.adapters), core.counters
        weights = self._gather_weights(model)
        moments = self._gather_moments(core)
        write_adapter = None
        if core.adapters is not None:
            write_adapter = partial(core.adapters.write, tensors=core.adapters.tensors())
        self._finish = (path, fingerprint, counters)
        self._written = self._writer.submit(
            self._write, path, model, weights, moments, write_adapter
        )

    @property
    def has_written(self) -> bool:
        """This rank's part is on the disk, or can not be written; `finish` does not wait for it."""
        return self._written is None or self._written.done()

    def finish(self) -> None:
        """Wait until all is on the disk. Raises on every rank if a rank could not write."""
        written, self._written = self._written, None
        if written is None:
            raise TrainerError("no checkpoint is being written")
        path, fingerprint, counters = self._finish
        with self._ranks.together("write its part of the checkpoint"):
            written.result()  # ends: with the disk
        with self._ranks.together("write the checkpoint"):
            if self._ranks.index == 0:
                write_state(path, fingerprint, counters, self._settings)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._writer.shutdown(wait=True)  # ends: with the disk

    def _gather_weights(self, model: Any) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}
        shards = named_tensors(model).items()
        merged = merged_tensors(model, shards, lambda t: whole(t, self._ranks.device))
        for name, full in merged:
            if self._ranks.index == 0:
                kept[name] = full.to("cpu", copy=True)
        return kept

    def _gather_moments(self, core: TrainerCore) -> dict[str, Tensor]:
        """Those that this rank writes: whole ones, about as much as each other rank."""
        kept: dict[str, Tensor] = {}
        loads = [0] * self._ranks.size
        for name, parameter in core.model.named_parameters():
            owner = loads.index(min(loads))
            loads[owner] += parameter.numel()
            for kind, tensor in core.optimizer.state.get(parameter, {}).items():
                full = whole(tensor, self._ranks.device)
                if self._ranks.index == owner:
                    kept[f"{kind}/{name}"] = full.to("cpu", copy=True)
        return kept

    def _write(
        self,
        path: Path,
        model: Any,
        weights: dict[str, Tensor],
        moments: dict[str, Tensor],
        write_adapter: Callable[[Path], None] | None,
    ) -> None:
        if self._ranks.index == 0:
            write_model(path, model, self._tokenizer, weights)
            if write_adapter is not None:
                with writable(path):
                    write_adapter(path / ADAPTER_FOLDER)
        file = optimizer_file(path, self._ranks.index, self._ranks.size)
        with writable(path):
            path.mkdir(parents=True, exist_ok=True)
            safetensors.torch.save_file(moments, file)
            # Here, where nobody waits for it: `finish` then has little left to do.
            REAL_FILES.sync(file)
            if self._ranks.index == 0:
                sync_tree(path / MODEL_FOLDER)


def load(path: Path, core: TrainerCore, ranks: Ranks, settings: dict[str, Any]) -> None:
    """Restore what any trainer saved. Nothing is changed before all has been found to fit."""
    adapters = core.adapters
    adapter: dict[str, Tensor] = {}
    if adapters is not None:
        _ = adapters.base  # gathered by all ranks together, before any of them may find an error
    with ranks.together("read the checkpoint"):
        state = read_state(path, core.model, adapters)
        spots = None
        if adapters is None:
            spots = find_spots(core.model, path / MODEL_FOLDER)
        with readable(path):
            if adapters is not None:
                adapter = adapters.read(path / ADAPTER_FOLDER)
            spots_of_moments = _find_moments(optimizer_files(path))
        shapes = {key: shape for key, (shape, _) in spots_of_moments.items()}
        parameters, names = check_moments(core.model, shapes)
        moments = {name: _empty_moments(parameters[name]) for name in names}
        with readable(path):
            _read_moments(moments, spots_of_moments)
    if adapters is None:
        with readable(path):
            fill(core.model, spots, lambda: restore_saved(core.model, path), ranks)
    else:
        adapters.put(adapter, put_rows)
    core.optimizer.state.clear()
    for name in names:
        core.optimizer.state[parameters[name]] = moments[name]
    core.restore(state["counters"])
    if ranks.index == 0:
        report_changes(path, state, settings)


def _find_moments(files: list[Path]) -> dict[str, tuple[tuple[int, ...], Path]]:
    found: dict[str, tuple[tuple[int, ...], Path]] = {}
    for file in files:
        with safetensors.safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                found[key] = (tuple(opened.get_slice(key).get_shape()), file)
    return found


def _empty_moments(parameter: torch.nn.Parameter) -> dict[str, Tensor]:
    like: dict[str, Tensor] = {kind: torch.empty_like(parameter) for kind in MOMENTS}
    return {"step": torch.zeros((), device=parameter.device), **like}


def _read_moments(
    moments: dict[str, dict[str, Tensor]], spots: dict[str, tuple[tuple[int, ...], Path]]
) -> None:
    """This rank's rows of each."""
    by_file: dict[Path, list[str]] = {}
    for key, (_, file) in spots.items():
        by_file.setdefault(file, []).append(key)
    for file, keys in by_file.items():
        with safetensors.safe_open(file, framework="pt") as opened:
            for key in keys:
                kind, _, name = key.partition("/")
                target = moments[name][kind].detach()
                part = local(target)
                if not target.ndim:
                    part.copy_(opened.get_tensor(key))
                elif part.numel():
                    part.copy_(opened.get_slice(key)[own_rows(target)])
