"""Where sharded trainers of tests get their models from; found in worker processes by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny import tiny_model

from paceline.models import blank_parameters
from paceline.trainers.values import ValueModel


@dataclass(frozen=True)
class GivenModel:
    """Made by a call; weights are read from a folder, if there is one."""

    make: Callable[..., Any]
    named: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    def blank(self) -> Any:
        with blank_parameters():
            return self.make(**self.named)

    def whole(self) -> Any:
        return self.make(**self.named)


def critic_of(**named: Any) -> ValueModel:
    """A critic whose head is not zero."""
    model = ValueModel(tiny_model(**named).base_model, width=32)
    with torch.no_grad():
        for parameter in model.head.parameters():
            numbers = torch.arange(parameter.numel()).view(parameter.shape)
            parameter.copy_(torch.sin(numbers + 1.0) / 10)
    return model
