"""A model whose parameters are sharded over the ranks of a trainer (FSDP2).

FSDP gathers parameters in hooks of the modules that it is told of: each decoder layer is one, and
what is left, embeddings and head, is gathered for the whole forward and backward. Its hooks of the
whole model fire around the forward of one root module; so the path from tokens to numbers, which
calls decoder and head one by one, is run inside the forward of a `Root`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from paceline.trainers.base import FSDPTrainerConfig
from paceline.trainers.forward import Result
from paceline.trainers.values import ValueModel

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class Root(nn.Module):
    """Runs paths through its model; the model's parameters are gathered where a path needs them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, path: Callable[[], Result]) -> Result:
        return cast(Result, _own(path()))

    def settle(self) -> None:
        """Give up what is still gathered. Before weights change, or else it would be used again."""
        for module in self.units():
            module.reshard()

    def recover(self) -> bool:
        """After a path or its backward was left by an error; False if torch can not do that."""
        reset = getattr(self, "reset_iter_state", None)
        if reset is None:
            return False
        reset()
        self.settle()
        return True

    def units(self) -> Iterator[FSDPModule]:
        """The modules that are gathered as one."""
        return (m for m in self.modules() if isinstance(m, FSDPModule))


def _own(found: Any) -> Any:
    """Tensors that are no views of others: FSDP's hooks on a view could be lost."""
    if isinstance(found, torch.Tensor):
        return found if found._base is None else found.clone()
    return tuple(map(_own, found)) if type(found) is tuple else found


def make_mesh(device: torch.device, ranks: int, replicas: int) -> DeviceMesh:
    """One axis over which parameters are sharded, and before it one of copies, if there are any."""
    if replicas == 1:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    shape = (replicas, ranks // replicas)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def shard(
    model: nn.Module, mesh: DeviceMesh, config: FSDPTrainerConfig, device: torch.device
) -> Root:
    """Shard a model without weights; each rank then has memory for its part, and no numbers yet.

    Gradients are summed over ranks, not averaged: their weights hold the global denominator.
    """
    offload = config.cpu_offload and device.type != "cpu"
    common: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    kinds = {p.dtype for p in model.parameters()}
    computed = torch.bfloat16 if config.autocast == "bfloat16" else None
    is_half = bool(kinds & {torch.bfloat16, torch.float16})
    precision = MixedPrecisionPolicy(
        param_dtype=computed,
        reduce_dtype=torch.float32 if computed is not None or is_half else None,
        cast_forward_inputs=False,
    )
    for layer in shard_units(model):
        layer.register_forward_hook(lambda _, __, output: _own(output))
        fully_shard(
            layer, reshard_after_forward=not config.keep_gathered, mp_policy=precision, **common
        )
    if isinstance(model, ValueModel):
        # It computes in the type of its own weights, whatever the body does.
        fully_shard(model.head, mp_policy=MixedPrecisionPolicy(), **common)
    root = Root(model)
    fully_shard(root, mp_policy=precision, **common)
    for unit in root.units():
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # else gloo is asked for what it has not
    reduce_unused: Any = getattr(root, "set_reduce_scatter_unused_params", None)
    if reduce_unused is not None and _has_experts(model):
        reduce_unused(True)  # an expert that saw no token here may have seen one of another rank
    held = torch.device("cpu") if offload else device
    root._apply(  # type: ignore[no-untyped-call]
        lambda t: torch.empty_like(t, device=held) if t.is_meta else t
    )
    return root


def shard_units(model: nn.Module) -> list[nn.Module]:
    """The decoder layers; no one inside another."""
    kinds = tuple(getattr(model, "_no_split_modules", None) or ())
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        is_unit = isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in kinds
        if is_unit and module not in inside:
            found.append(module)
            inside.update(module.modules())
    if not found:
        logger.warning(
            "%s has no layers that can be gathered one by one: the whole model is at once, which "
            "takes the memory of all of it on each device",
            type(model).__name__,
        )
    return found


def _has_experts(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any(getattr(config, name, None) for name in names)


def whole(tensor: Tensor, device: torch.device) -> Tensor:
    """The full tensor of a shard, on the device; all ranks ask for the same one in turn."""
    if isinstance(tensor, DTensor):
        # On the host the shards wait for the device, and gloo does not reach them there.
        return cast(DTensor, tensor.detach().to(device)).full_tensor()
    return tensor.detach().to(device)


def own_rows(tensor: Tensor) -> slice:
    """Which rows of the full tensor this rank holds."""
    if not isinstance(tensor, DTensor):
        return slice(0, tensor.shape[0] if tensor.ndim else None)
    size, place = tensor.device_mesh.size(-1), tensor.device_mesh.get_local_rank(-1)
    rows = tensor.shape[0]
    step = -(-rows // size)
    return slice(min(place * step, rows), min((place + 1) * step, rows))
