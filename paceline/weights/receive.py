"""What an in-process receiver does with a plan: one call, whichever the transport."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from paceline.errors import WeightError
from paceline.weights.base import Parcel, WeightPlan
from paceline.weights.copy import receive_copy
from paceline.weights.disk import read_folder
from paceline.weights.handles import unpack
from paceline.weights.shared import receive_shared

if TYPE_CHECKING:
    from torch import Tensor, nn


T = TypeVar("T")


def receive_into(module: nn.Module, plan: WeightPlan) -> None:
    """Bring the plan's weights into the module. Raises WeightError if they do not fit."""
    match plan.transport:
        case "shared":
            receive_shared(module, plan)
        case "copy":
            receive_copy(module, plan)
        case _:
            raise WeightError(
                f"policy {plan.policy!r}: transport {plan.transport!r} comes in parcels, which are "
                "not received in one call"
            )


class Runs(Protocol):
    """Runs a function in the thread that the module belongs to."""

    def __call__(self, function: Callable[..., T], /, *arguments: Any) -> Awaitable[T]: ...


async def receive_parcels(
    module: nn.Module, plan: WeightPlan, run: Runs = asyncio.to_thread
) -> None:
    """Copy what a trainer of another process sends into the module, in place; types may differ.

    A tied parameter comes under any of its names. Each parcel is checked before it is written.
    Raises WeightError if one does not fit, and at the end if a parameter was not among them; the
    module holds a mixture of versions then.
    """
    what = f"policy {plan.policy!r}, weights of version {plan.version}"
    if plan.source is None:
        raise WeightError(
            f"{what}: the plan has no source; let the trainer fill it (`Trainer.send`) before a "
            "receiver gets it"
        )
    if plan.transport not in ("handles", "disk"):
        raise WeightError(f"{what}: an engine in this process can not receive {plan.transport!r}")
    parameters = dict(module.named_parameters(remove_duplicate=False))
    targets: dict[str, Tensor] = {**module.state_dict(keep_vars=True), **parameters}
    written: set[int] = set()
    async with aclosing(plan.source.parcels()) as parcels:  # type: ignore[type-var]
        async for parcel in parcels:
            written |= await run(_receive, what, targets, parcel)
    missing = [name for name, tensor in parameters.items() if id(tensor) not in written]
    if missing:
        raise WeightError(f"{what}: {len(missing)} parameters did not come: {_some(missing)}")


def _receive(what: str, targets: dict[str, Tensor], parcel: Parcel) -> set[int]:
    problems = [
        f"{info.name} {tuple(info.shape)}"
        for info in parcel.tensors
        if info.name not in targets or tuple(targets[info.name].shape) != tuple(info.shape)
    ]
    if problems:
        raise WeightError(
            f"{what}: {len(problems)} tensors of the sender have no place of their shape in the "
            f"engine's model: {_some(problems)}"
        )
    written = set()
    with torch.no_grad():
        for name, tensor in _tensors(parcel):
            targets[name].copy_(tensor)
            written.add(id(targets[name]))
    if any(target.is_cuda for target in targets.values()):
        torch.cuda.synchronize()
    return written


def _tensors(parcel: Parcel) -> Iterable[tuple[str, Tensor]]:
    if parcel.folder is not None:
        return read_folder(Path(parcel.folder))
    if not parcel.handles:
        raise WeightError("a parcel has neither handles nor a folder")
    return unpack(parcel.handles[0])


def _some(names: list[str]) -> str:
    return ", ".join(names[:5])
