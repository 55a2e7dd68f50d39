"""Transport `shared`: engine and trainer hold the same storage, so a publish moves nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import WeightError
from paceline.weights.base import WeightPlan
from paceline.weights.tensors import named_tensors

if TYPE_CHECKING:
    from torch import nn


def receive_shared(module: nn.Module, plan: WeightPlan) -> None:
    """Check that the module's tensors are the sender's own.

    Raises WeightError if a tensor has storage of its own: it would keep serving old weights.
    """
    if plan.tensors is None:
        raise WeightError(
            f"policy {plan.policy!r}: the plan of version {plan.version} carries no tensors to "
            "compare storage with; let the trainer fill it (`Trainer.send`) before a receiver"
        )
    own = named_tensors(module)
    apart = [
        name
        for name, tensor in plan.tensors.items()
        if name not in own
        or own[name].data_ptr() != tensor.data_ptr()
        or own[name].shape != tensor.shape
    ]
    if apart or len(own) != len(plan.tensors):
        listed = ", ".join(apart[:5]) or "names differ"
        raise WeightError(
            f"policy {plan.policy!r}: transport `shared` was asked for, but {len(apart)} of "
            f"{len(plan.tensors)} tensors of the engine are not the trainer's own ({listed}); "
            'set engine.weights = "copy", or build engine and trainer from one model'
        )
