"""Parameters of an engine that holds its own copy: taking new ones, dropping them, coming back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from paceline.errors import WeightError

_NAMES_SHOWN = 5


class OwnWeights:
    """The parameters and saved buffers of a module, by Hugging Face name; tied ones once."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        saved = module.state_dict(keep_vars=True)
        self._targets: dict[str, Tensor] = {**saved, **self._parameters}
        self._dropped: dict[int, tuple[torch.Size, torch.dtype, torch.device]] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy all parameters in, or raise WeightError and leave every one untouched.

        A tied parameter may come under any of its names. Saved buffers may come too.
        """
        if self._dropped:
            raise WeightError("the engine's weights are asleep: wake them before a publish")
        self._check_names(tensors)
        for name, tensor in tensors.items():
            target = self._targets[name]
            if tensor.shape != target.shape:
                raise WeightError(
                    f"{name} was sent with shape {tuple(tensor.shape)}, and the engine holds "
                    f"{tuple(target.shape)}: trainer and engine must be made from the same model"
                )
        self._check_ties(tensors)
        with torch.no_grad():
            for name, tensor in tensors.items():
                self._targets[name].copy_(tensor)

    def _check_names(self, tensors: Mapping[str, Tensor]) -> None:
        unknown = [name for name in tensors if name not in self._targets]
        covered = {id(self._targets[name]) for name in tensors if name in self._targets}
        missing = [n for n, p in self._parameters.items() if id(p) not in covered]
        if unknown or missing:
            raise WeightError(
                "the tensors sent do not fit the engine's model: "
                + "; ".join(
                    f"{len(names)} {kind} ({', '.join(names[:_NAMES_SHOWN])}"
                    f"{', ...' if len(names) > _NAMES_SHOWN else ''})"
                    for kind, names in (("missing", missing), ("unknown", unknown))
                    if names
                )
                + ". Nothing was changed"
            )

    def _check_ties(self, tensors: Mapping[str, Tensor]) -> None:
        first: dict[int, str] = {}
        for name, tensor in tensors.items():
            other = first.setdefault(id(self._targets[name]), name)
            if tensor is not tensors[other] and not torch.equal(tensor, tensors[other]):
                raise WeightError(
                    f"{other} and {name} are one tied parameter in the engine's model, and "
                    "differ in what was sent: untie it in the engine's model or tie it in the "
                    "trainer's. Nothing was changed"
                )

    def drop(self) -> None:
        """Free the memory of all parameters. Idempotent."""
        for parameter in self._parameters.values():
            if id(parameter) not in self._dropped:
                self._dropped[id(parameter)] = (parameter.shape, parameter.dtype, parameter.device)
                parameter.data = parameter.data.new_empty(0)

    def allocate(self) -> None:
        """Take the memory again; what stands in it is undefined until `copy`. Idempotent."""
        for parameter in self._parameters.values():
            if id(parameter) in self._dropped:
                shape, dtype, device = self._dropped.pop(id(parameter))
                parameter.data = torch.empty(shape, dtype=dtype, device=device)
