"""Transport `copy`: tensors are copied into the receiver's own storage, in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from paceline.errors import WeightError
from paceline.weights.base import WeightPlan

if TYPE_CHECKING:
    from torch import Tensor, nn


def receive_copy(module: nn.Module, plan: WeightPlan) -> None:
    """Copy the plan's tensors into the module, in place; types may differ, shapes may not.

    A tied parameter may come under any of its names, or all of them. Saved buffers may come too.
    Everything is checked before the first tensor is written, so that a refused plan leaves the
    module as it was. Raises WeightError.
    """
    if plan.tensors is None:
        raise WeightError(
            f"policy {plan.policy!r}: the plan of version {plan.version} carries no tensors; "
            "let the trainer fill it (`Trainer.send`) before a receiver gets it"
        )
    parameters = dict(module.named_parameters(remove_duplicate=False))
    targets: dict[str, Tensor] = {**module.state_dict(keep_vars=True), **parameters}
    problems = list(_problems(plan.tensors, targets, parameters))
    if problems:
        raise WeightError(
            f"policy {plan.policy!r}: weights of version {plan.version} do not fit the engine's "
            f"model ({len(problems)} differences): {'; '.join(problems[:5])}. Nothing was changed"
        )
    with torch.no_grad():
        for name, tensor in plan.tensors.items():
            targets[name].copy_(tensor)


def _problems(
    tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> Iterator[str]:
    covered = {id(targets[name]) for name in tensors if name in targets}
    for name, parameter in parameters.items():
        if id(parameter) not in covered:
            yield f"{name} is missing in the sender"
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        if name not in targets:
            yield f"{name} is unknown to the receiver"
            continue
        target = targets[name]
        if target.shape != tensor.shape:
            yield (
                f"{name} has shape {tuple(tensor.shape)} in the sender and "
                f"{tuple(target.shape)} in the receiver"
            )
            continue
        other = first.setdefault(id(target), name)
        if tensor is not tensors[other] and not torch.equal(tensor, tensors[other]):
            yield f"{other} and {name} are one tied parameter in the receiver, and differ"
