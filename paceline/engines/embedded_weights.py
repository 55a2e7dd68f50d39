"""Parameters of an engine that holds its own copy: dropping them, and coming back."""

from __future__ import annotations

import torch
from torch import nn


class OwnWeights:
    """The parameters of a module; tied ones once."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = list(module.parameters())
        self._dropped: dict[int, tuple[torch.Size, torch.dtype, torch.device]] = {}

    def drop(self) -> None:
        """Free the memory of all parameters. Idempotent."""
        for parameter in self._parameters:
            if id(parameter) not in self._dropped:
                self._dropped[id(parameter)] = (parameter.shape, parameter.dtype, parameter.device)
                parameter.data = parameter.data.new_empty(0)

    def allocate(self) -> None:
        """Take the memory again; what stands in it is undefined until new ones are copied in."""
        for parameter in self._parameters:
            if id(parameter) in self._dropped:
                shape, dtype, device = self._dropped.pop(id(parameter))
                parameter.data = torch.empty(shape, dtype=dtype, device=device)
