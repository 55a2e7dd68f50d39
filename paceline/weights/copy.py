"""Transport `copy`: tensors are copied into the receiver's own storage, in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.errors import WeightError
from paceline.weights.base import WeightPlan
from paceline.weights.tensors import named_tensors

if TYPE_CHECKING:
    from torch import nn


def receive_copy(module: nn.Module, plan: WeightPlan) -> None:
    """Copy the plan's tensors into the module, in place; types may differ, shapes may not.

    Everything is checked before the first tensor is written, so that a refused plan leaves the
    module as it was. Raises WeightError.
    """
    if plan.tensors is None:
        raise WeightError(
            f"policy {plan.policy!r}: the plan of version {plan.version} carries no tensors; "
            "let the trainer fill it (`Trainer.send`) before a receiver gets it"
        )
    own = named_tensors(module)
    problems = [f"{name} is missing in the sender" for name in own if name not in plan.tensors]
    for name, tensor in plan.tensors.items():
        if name not in own:
            problems.append(f"{name} is unknown to the receiver")
        elif own[name].shape != tensor.shape:
            problems.append(
                f"{name} has shape {tuple(tensor.shape)} in the sender and "
                f"{tuple(own[name].shape)} in the receiver"
            )
    if problems:
        raise WeightError(
            f"policy {plan.policy!r}: weights of version {plan.version} do not fit the engine's "
            f"model ({len(problems)} differences): {'; '.join(problems[:5])}"
        )
    with torch.no_grad():
        for name, tensor in plan.tensors.items():
            own[name].copy_(tensor)
