"""What an in-process receiver does with a plan: one call, whichever the transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.weights.base import WeightPlan
from paceline.weights.copy import receive_copy
from paceline.weights.shared import receive_shared

if TYPE_CHECKING:
    from torch import nn


def receive_into(module: nn.Module, plan: WeightPlan) -> None:
    """Bring the plan's weights into the module. Raises WeightError if they do not fit."""
    match plan.transport:
        case "shared":
            receive_shared(module, plan)
        case "copy":
            receive_copy(module, plan)
