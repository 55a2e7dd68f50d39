"""Numbers for a sharded model: each rank reads its own rows of the files that hold them by name.

Else rank 0 makes the whole model on the host, and sends each tensor to all: for weights that are
drawn, or stand in files in another form than in the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from paceline.errors import ConfigError
from paceline.models import ModelConfig, blank_model, blank_parameters, load_model
from paceline.trainers.fsdp_ranks import Ranks
from paceline.trainers.fsdp_shards import own_rows
from paceline.trainers.optimizer import local
from paceline.trainers.values import HEAD_FILE, ValueModel, load_value_model
from paceline.weights.adapters import base_tensors
from paceline.weights.tensors import named_tensors

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class ModelSource(Protocol):
    """Where a model comes from; travels to the ranks by pickle."""

    def blank(self) -> PreTrainedModel | ValueModel:
        """Its modules, with parameters on the meta device."""

    def whole(self) -> PreTrainedModel | ValueModel:
        """All of it, on the CPU."""

    @property
    def folder(self) -> Path | None:
        """Holds its weights as safetensors; None if they are nowhere to be read."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """The language model of a `[model]` block."""

    config: ModelConfig
    seed: int
    key: str = "model"

    def blank(self) -> PreTrainedModel:
        return blank_model(self.config, key=self.key)

    def whole(self) -> PreTrainedModel:
        return load_model(self.config, seed=self.seed, key=self.key)

    @property
    def folder(self) -> Path | None:
        return _weight_folder(self.config)


@dataclass(frozen=True, slots=True)
class NamedCritic:
    """The critic that starts from the model of such a block, or is held there."""

    config: ModelConfig
    seed: int
    key: str = "model"

    def blank(self) -> ValueModel:
        model = blank_model(self.config, key=self.key)
        if model.base_model is model or model.get_output_embeddings() is None:
            raise ConfigError(
                f"{self.key}.path = {self.config.path!r}: {type(model).__name__} has no body apart "
                "from its head, on which a critic could be built; use another model"
            )
        width = model.get_output_embeddings().weight.shape[1]
        with blank_parameters():
            return ValueModel(model.base_model, width)

    def whole(self) -> ValueModel:
        return load_value_model(self.config, seed=self.seed, key=self.key)

    @property
    def folder(self) -> Path | None:
        return _weight_folder(self.config)


def _weight_folder(config: ModelConfig) -> Path | None:
    if config.random_init or config.adapter is not None:
        return None
    return Path(config.path).expanduser()


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a tensor stands."""

    file: Path
    key: str


Spots = dict[str, Spot | None]
"""By the name in the model; None for zeros."""


def fill(
    model: nn.Module, spots: Spots | None, make_whole: Callable[[], nn.Module], ranks: Ranks
) -> None:
    """Write the numbers into the model's tensors, in place, but for those of an adapter.

    spots: what `find_spots` returned. make_whole: called on rank 0 alone, where it takes that.
    """
    targets = base_tensors(model)
    if ranks.all_true(spots is not None):
        with ranks.together("read the weights"):
            read_rows(targets, cast(Spots, spots))
        return
    full: Mapping[str, Tensor] = {}
    with ranks.together("load the model"):
        if ranks.index == 0:
            full = named_tensors(make_whole())
            if missing := targets.keys() - full.keys():
                raise ValueError(f"{len(missing)} tensors are missing: {sorted(missing)[:5]}")
    for name, target in targets.items():
        shape, kind = tuple(target.shape), target.dtype
        if ranks.index == 0:
            buffer = full[name].to(ranks.device, kind).contiguous()
        else:
            buffer = torch.empty(shape, dtype=kind, device=ranks.device)
        ranks.broadcast(buffer)
        local(target).copy_(buffer[own_rows(target)] if shape else buffer)


def put_rows(target: Tensor, full: Tensor) -> None:
    """Write this rank's rows of a whole tensor, in place."""
    local(target).copy_(full[own_rows(target)])


def read_rows(targets: Mapping[str, Tensor], spots: Spots) -> None:
    """Read this rank's rows of each tensor from its file."""
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for name, target in targets.items():
            part, spot = local(target), spots[name]
            if spot is None:
                part.zero_()
                continue
            if spot.file not in opened:
                opened[spot.file] = stack.enter_context(safe_open(spot.file, framework="pt"))
            if not target.ndim:
                part.copy_(opened[spot.file].get_tensor(spot.key))
            elif part.numel():
                part.copy_(opened[spot.file].get_slice(spot.key)[own_rows(target)])


def find_spots(model: nn.Module, folder: Path | None) -> Spots | None:
    """Where each tensor of the model stands; None unless all are there as they are in the model."""
    if folder is None or not folder.is_dir():
        return None
    if isinstance(model, ValueModel):
        body = find_spots(model.body, folder)
        head = _head_spots(model, folder / HEAD_FILE)
        if body is None or head is None:
            return None
        return {f"body.{name}": spot for name, spot in body.items()} | head
    if _is_converted(model):
        return None
    try:
        shapes = _shapes(_files(folder))
    except (OSError, ValueError, SafetensorError):
        return None  # whoever loads the whole says what is wrong
    prefix = getattr(model, "base_model_prefix", "")
    spots: Spots = {}
    for name, tensor in base_tensors(model).items():
        found = [key for key in (name, f"{prefix}.{name}") if key in shapes]
        if not found or shapes[found[0]][0] != list(tensor.shape):
            return None
        spots[name] = Spot(shapes[found[0]][1], found[0])
    return spots


def _head_spots(model: ValueModel, file: Path) -> Spots | None:
    names = [name for name, _ in model.head.named_parameters()]
    if not file.is_file():
        return {f"head.{name}": None for name in names}
    try:
        shapes = _shapes([file])
    except (OSError, SafetensorError):
        return None
    if any(name not in shapes for name in names):
        return None
    return {f"head.{name}": Spot(file, name) for name in names}


def _files(folder: Path) -> Iterable[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return [folder / name for name in sorted(set(named.values()))]


def _shapes(files: Iterable[Path]) -> dict[str, tuple[list[int], Path]]:
    found: dict[str, tuple[list[int], Path]] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                found[key] = (list(opened.get_slice(key).get_shape()), file)
    return found


def _is_converted(model: nn.Module) -> bool:
    """True if transformers may change tensors of this kind of model as it loads them."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:
        return True
    kinds = {getattr(getattr(m, "config", None), "model_type", None) for m in model.modules()}
    return any(get_checkpoint_conversion_mapping(kind) for kind in kinds - {None})
