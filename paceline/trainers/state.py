"""The folder that a trainer saves: model, moments and counters. No pickle; durable when written.

model/                  Hugging Face format, with the tokenizer; of a critic its body, and its head
adapter/                PEFT's format, where an adapter is trained, which model/ has merged; a
                        resume takes the weights below it from `[model]`
optimizer.safetensors   exp_avg, exp_avg_sq and step of each parameter; or several such files
trainer.json            counters, the model's fingerprint, settings and versions

A trainer of several processes writes the same: each of them some of the files of moments, all of
whole tensors. So what one trainer wrote any other one can load.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch
import transformers

from paceline.errors import CheckpointError, PacelineError, ResumeMismatchError
from paceline.models import (
    export_model,
    fingerprint_differences,
    model_fingerprint,
    restore_model,
    writable,
)
from paceline.observe.files import REAL_FILES, encode_json
from paceline.trainers.lora import ADAPTER_FOLDER, Adapters
from paceline.trainers.optimizer import moments, set_moments
from paceline.trainers.values import ValueModel, export_value_model, restore_value_model
from paceline.weights.adapters import merged_tensors
from paceline.weights.tensors import named_tensors

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

FORMAT = 1
STATE_FILE = "trainer.json"
OPTIMIZER_FILE = "optimizer.safetensors"
MODEL_FOLDER = "model"


@dataclass(frozen=True, slots=True)
class HeldState:
    """What a save writes, as it was at one moment."""

    weights: dict[str, Tensor] | None
    """By name, on the CPU. None: those that the model has when they are written."""
    moments: dict[str, Tensor]
    fingerprint: dict[str, Any]
    counters: dict[str, int]
    adapter: dict[str, Tensor] | None = None
    """As `Adapters.tensors` gives it, where an adapter is trained."""


def hold_state(
    model: PreTrainedModel | ValueModel,
    optimizer: torch.optim.Optimizer,
    counters: dict[str, int],
    adapters: Adapters | None = None,
    *,
    copies: bool,
) -> HeldState:
    """copies: of all tensors, so that training may go on before they are written."""
    weights: dict[str, Tensor] | None = None
    if copies or adapters is not None:
        own = merged_tensors(model, named_tensors(model).items(), torch.Tensor.detach)
        weights = {name: tensor.to("cpu", copy=copies).contiguous() for name, tensor in own}
    return HeldState(
        weights,
        moments(model, optimizer, copies=copies),
        fingerprint_of(model, adapters),
        counters,
        None if adapters is None else adapters.tensors(),
    )


def fingerprint_of(
    model: PreTrainedModel | ValueModel, adapters: Adapters | None
) -> dict[str, Any]:
    """What a checkpoint and a run must have in common; with adapters, the frozen weights too."""
    own = model_fingerprint(model)
    return own if adapters is None else {**own, "base": adapters.base}


def save_state(
    path: Path,
    model: PreTrainedModel | ValueModel,
    tokenizer: PreTrainedTokenizerBase | None,
    held: HeldState,
    settings: dict[str, Any],
    adapters: Adapters | None = None,
) -> None:
    """Write everything into the folder `path`; every file is on the disk when this returns.

    Raises CheckpointError if a file can not be written.
    """
    write_model(path, model, tokenizer, held.weights)
    with writable(path):
        safetensors.torch.save_file(held.moments, path / OPTIMIZER_FILE)
        if adapters is not None and held.adapter is not None:
            adapters.write(path / ADAPTER_FOLDER, held.adapter)
    write_state(path, held.fingerprint, held.counters, settings)


def write_model(
    path: Path,
    model: PreTrainedModel | ValueModel,
    tokenizer: PreTrainedTokenizerBase | None,
    weights: dict[str, Tensor] | None,
) -> None:
    """The model's folder in `path`. Raises CheckpointError if a file can not be written."""
    export = export_value_model if isinstance(model, ValueModel) else export_model
    with writable(path):
        export(model, tokenizer, path / MODEL_FOLDER, weights)


def write_state(
    path: Path, fingerprint: dict[str, Any], counters: dict[str, int], settings: dict[str, Any]
) -> None:
    """The file that says what the others are; then every file is on the disk.

    fingerprint: of the model, from `paceline.models.model_fingerprint`.
    """
    state = {
        "format": FORMAT,
        "counters": counters,
        "settings": settings,
        "environment": _environment(),
        "model": fingerprint,
    }
    with writable(path):
        REAL_FILES.write(path / STATE_FILE, encode_json(state, indent=1))
        sync_tree(path)


def load_state(
    path: Path,
    model: PreTrainedModel | ValueModel,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    adapters: Adapters | None = None,
) -> dict[str, int]:
    """Put the weights and moments of `path` into the model and optimizer; returns the counters.

    Weights are written into the model's own tensors, whose storage an engine may share. Raises
    CheckpointError for a folder that can not be read and ResumeMismatchError for one of another
    model, both before anything is changed.
    """
    state = read_state(path, model, adapters)
    with readable(path):
        if adapters is None:
            weights = named_tensors(restore_saved(model, path))
        else:
            weights = adapters.read(path / ADAPTER_FOLDER)
        tensors: dict[str, Tensor] = {}
        for file in optimizer_files(path):
            tensors |= safetensors.torch.load_file(file)
    set_moments(model, optimizer, tensors)
    if adapters is None:
        with torch.no_grad():
            for name, tensor in named_tensors(model).items():
                tensor.copy_(weights[name])
    else:
        adapters.put(weights)
    report_changes(path, state, settings)
    return dict(state["counters"])


def read_state(
    path: Path, model: PreTrainedModel | ValueModel, adapters: Adapters | None = None
) -> dict[str, Any]:
    """What stands in `trainer.json`. Raises ResumeMismatchError if it is of another model."""
    state = _read(path / STATE_FILE)
    if differences := fingerprint_differences(state["model"], model_fingerprint(model)):
        raise ResumeMismatchError(
            f"{path} holds another model than the run ({len(differences)} differences): "
            f"{'; '.join(differences[:5])}; resume with the former [model] or [critic] "
            "block, or start a run with another name"
        )
    if adapters is not None:
        adapters.check_base(state["model"].get("base"), path)
    return state


def restore_saved(model: PreTrainedModel | ValueModel, path: Path) -> PreTrainedModel | ValueModel:
    """A model like this one with the saved weights, on the CPU."""
    if isinstance(model, ValueModel):
        return restore_value_model(model, path / MODEL_FOLDER)
    return restore_model(model, path / MODEL_FOLDER)


def optimizer_files(path: Path) -> list[Path]:
    """The files that hold the moments together. Raises OSError if one of them is not there."""
    files = sorted(path.glob(f"{OPTIMIZER_FILE.removesuffix('.safetensors')}-*.safetensors"))
    expected = int(files[0].stem.rpartition("-")[2]) if files else 1
    if len(files) not in (0, expected):
        raise FileNotFoundError(f"{len(files)} of {expected} files of moments are there")
    return files or [path / OPTIMIZER_FILE]


def optimizer_file(path: Path, index: int, count: int) -> Path:
    """The file that process `index` of `count` writes."""
    if count == 1:
        return path / OPTIMIZER_FILE
    stem = OPTIMIZER_FILE.removesuffix(".safetensors")
    return path / f"{stem}-{index + 1:05d}-of-{count:05d}.safetensors"


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Damage that is found within it is a CheckpointError."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        if isinstance(error, PacelineError):
            raise
        raise CheckpointError(
            f"{path} can not be read: {error}; resume from an older checkpoint"
        ) from error


def _environment() -> dict[str, Any]:
    """What bit-equal results depend on, besides the settings."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }


def _read(file: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} can not be read: {error}; resume from an older checkpoint"
        ) from error
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} has format {state.get('format')!r}, this version of Paceline reads {FORMAT}; "
            "resume with the version that wrote it"
        )
    return state


def report_changes(path: Path, state: dict[str, Any], settings: dict[str, Any]) -> None:
    """Settings may change on purpose; an environment that changed unnoticed changes last bits."""
    as_saved = json.loads(encode_json(settings))  # infinities are strings in a file
    parts = [(state["settings"], as_saved, logging.INFO, "")]
    note = "; numbers will not be bit-identical"
    parts.append((state["environment"], _environment(), logging.WARNING, note))
    for before, now, level, note in parts:
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                change = (key, now.get(key), before.get(key))
                logger.log(level, "%s: resumed with another %s: %r, was %r%s", path, *change, note)


def sync_tree(folder: Path) -> None:
    """Make every file below the folder durable, then the folders, so that a rename commits them."""
    for entry in sorted(folder.rglob("*"), reverse=True):
        REAL_FILES.sync(entry)
    REAL_FILES.sync(folder)
