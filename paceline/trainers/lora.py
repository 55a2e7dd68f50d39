"""Training a low-rank adapter (LoRA, arXiv 2106.09685) in the place of a model's weights.

PEFT puts the adapter into the model's own modules, so that whatever calls its decoder or its head
finds it. The model without its adapter is the reference: no second copy of it exists.

Legend: R rank, I inputs, O outputs of a layer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from paceline.errors import ConfigError, ResumeMismatchError, TrainerError
from paceline.models import load_peft
from paceline.trainers.lora_settings import LoraConfig
from paceline.types import derive_seed
from paceline.weights.adapters import (
    ADAPTER,
    AdaptedLayer,
    Gather,
    adapted_layers,
    base_tensors,
)
from paceline.weights.tensors import checksums

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

ADAPTER_FOLDER = "adapter"
ADAPTER_FILE = "adapter_model.safetensors"
MOST_NAMED = 20

Put = Callable[["Tensor", "Tensor"], object]
"""Writes a whole tensor into one that a model holds, which may be a shard."""


class Adapters:
    """The adapter of a model whose other weights are frozen."""

    def __init__(self, model: Any, gather: Gather) -> None:
        self._model = model
        self._gather = gather
        self._layers = adapted_layers(model)
        self._base: str | None = None

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within it, the model is what it is without its adapter."""
        try:
            for layer in self._layers.values():
                layer.module.enable_adapters(False)
            yield
        finally:
            for layer in self._layers.values():
                layer.module.enable_adapters(True)

    @torch.no_grad()
    def norm(self) -> float:
        """Frobenius norm of all that is added to the weights, which is never computed itself.

        |B A|^2 = sum (B^T B) * (A A^T), both [R, R].
        """
        squares = [_square(layer, self._gather) for layer in self._layers.values()]
        return math.sqrt(float(torch.stack(squares).sum()))

    def parameters(self) -> dict[str, nn.Parameter]:
        """By the names that PEFT gives them in files."""
        found = {}
        for name, layer in self._layers.items():
            found[f"base_model.model.{name}.lora_A.weight"] = layer.a
            found[f"base_model.model.{name}.lora_B.weight"] = layer.b
        return found

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """Copies on the host, whole, by the names of `parameters`."""
        return {
            name: self._gather(parameter).to("cpu", copy=True).contiguous()
            for name, parameter in self.parameters().items()
        }

    def write(self, path: Path, tensors: dict[str, Tensor]) -> None:
        """Into the folder `path`, in PEFT's format. tensors: as `tensors` gave them."""
        path.mkdir(parents=True, exist_ok=True)
        self._model.peft_config[ADAPTER].save_pretrained(str(path))
        safetensors.torch.save_file(tensors, path / ADAPTER_FILE, {"format": "pt"})

    @torch.no_grad()
    def put(self, tensors: Mapping[str, Tensor], put: Put = torch.Tensor.copy_) -> None:
        """Bring back what `read` returned."""
        for name, parameter in self.parameters().items():
            put(parameter, tensors[name])

    def read(self, path: Path) -> dict[str, Tensor]:
        """What `write` wrote. Raises ValueError if it does not fit."""
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path / ADAPTER_FILE)
        own = {name: parameter.shape for name, parameter in self.parameters().items()}
        if {name: tensor.shape for name, tensor in tensors.items()} != own:
            raise ValueError(f"{ADAPTER_FILE} is of another adapter")
        return tensors

    @property
    def base(self) -> str:
        """A hash of the frozen weights."""
        if self._base is None:
            digest = blake2b(digest_size=16)
            for name, tensor in base_tensors(self._model).items():
                digest.update(repr(checksums({name: self._gather(tensor)})).encode())
            self._base = digest.hexdigest()
        return self._base

    def check_base(self, saved: object, path: Path) -> None:
        """Raise ResumeMismatchError if a checkpoint was saved over other weights."""
        if saved != self.base:
            raise ResumeMismatchError(
                f"{path} holds an adapter of other weights than those that `[model]` names now: "
                "they were changed since; bring them back, or start a run with another name from "
                "the checkpoint's merged model"
            )


def add_adapters(
    model: Any, config: LoraConfig, *, seed: int, gather: Gather = torch.Tensor.detach
) -> Adapters:
    """Put an adapter into the model, in place, and freeze all else.

    seed: with the name of each layer it decides what A holds. A model without memory gets an
    adapter without memory, for `fill_adapters`. Raises ConfigError if the targets do not fit.
    """
    if adapted_layers(model):
        raise TrainerError("the model has an adapter already: give one without")
    peft = load_peft("trainer.lora")
    chosen = find_targets(model, config)
    model.requires_grad_(False)
    modules = dict(model.named_modules())
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.resolved_alpha,
        use_rslora=config.rslora,
        target_modules=sorted(chosen),
        fan_in_fan_out=all(isinstance(modules[name], Conv1D) for name in chosen),
        task_type="CAUSAL_LM",
    )
    settings.base_model_name_or_path = getattr(model.config, "_name_or_path", None) or None
    with torch.random.fork_rng(devices=[]):  # what PEFT draws is replaced
        peft.inject_adapter_in_model(settings, model)
    model.eval()
    settings.target_modules = _short_names(chosen, linear_layers(model))
    settings.inference_mode = True  # of what is written
    for layer in adapted_layers(model).values():
        kind = torch.promote_types(layer.module.base_layer.weight.dtype, torch.float32)
        layer.a.data, layer.b.data = layer.a.data.to(kind), layer.b.data.to(kind)
    if not any(parameter.is_meta for parameter in model.parameters()):
        fill_adapters(model, seed)
    _tell(model, len(chosen))
    return Adapters(model, gather)


@torch.no_grad()
def fill_adapters(model: nn.Module, seed: int, put: Put = torch.Tensor.copy_) -> None:
    """The numbers before the first step: B is zero, A as wide as PEFT's, by seed and name alone."""
    for name, layer in adapted_layers(model).items():
        layer.b.zero_()
        put(layer.a, first_a(layer, name, seed))


def first_a(layer: AdaptedLayer, name: str, seed: int) -> Tensor:
    """A of one layer before the first step, whole, in float32 on the CPU."""
    shape = layer.a.shape
    generator = torch.Generator().manual_seed(derive_seed(seed, "lora", name))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def find_targets(model: Any, config: LoraConfig) -> list[str]:
    """The layers that get an adapter. Raises ConfigError with the names that there are."""
    names = linear_layers(model)
    kinds = sorted({name.rpartition(".")[2] for name in names})
    known = ", ".join(kinds[:MOST_NAMED]) or "none"
    if config.targets == "all-linear":
        if not names:
            raise ConfigError(f"trainer.lora: {type(model).__name__} has no linear layer to adapt")
        return names
    for target in config.targets:
        if not any(_is_named(name, target) for name in names):
            raise ConfigError(
                f"trainer.lora.targets: {target!r} names no linear layer of "
                f"{type(model).__name__}, whose head over the vocabulary is never adapted. "
                f"There are: {known}"
            )
    return [name for name in names if any(_is_named(name, target) for target in config.targets)]


def linear_layers(model: Any) -> list[str]:
    """Names of all linear layers but the head over the vocabulary; of adapted ones, without what
    is inside."""
    head = model.get_output_embeddings()
    adapted = adapted_layers(model)
    return [
        name
        for name, module in model.named_modules()
        if name in adapted
        or (
            isinstance(module, nn.Linear | Conv1D)
            and module is not head
            and not any(name.startswith(f"{outer}.") for outer in adapted)
        )
    ]


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _short_names(chosen: list[str], names: list[str]) -> list[str]:
    """What stands in PEFT's configuration: the ends of the names, where they mean the same."""
    short = {name.rpartition(".")[2] for name in chosen}
    meant = [name for name in names if any(_is_named(name, one) for one in short)]
    return sorted(short) if meant == chosen else chosen


def _square(layer: AdaptedLayer, gather: Gather) -> Tensor:
    a_RI, b_OR = gather(layer.a), gather(layer.b)
    product_RR = (b_OR.T @ b_OR).double() * (a_RI @ a_RI.T).double()
    return (product_RR.sum() * layer.scale**2).clamp(min=0).cpu()


def _tell(model: nn.Module, num_layers: int) -> None:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    total, trained = sum(n for n, _ in sizes), sum(n for n, is_trained in sizes if is_trained)
    logger.info(
        "LoRA: %s of %s parameters are trained (%.2f %%), in %d layers",
        f"{trained:,}",
        f"{total:,}",
        100 * trained / total,
        num_layers,
    )
