"""The weight seam: a publish is one transaction over all engines of a policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

Transport = Literal["shared", "copy"]
"""shared: engine and trainer hold the same storage. copy: tensors are copied in one process."""


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """One publish: which version, over which transport."""

    policy: str
    version: int
    transport: Transport
    tensors: Mapping[str, Tensor] | None = None
    """For in-process transports: Hugging Face name -> tensor, as the trainer holds them."""


class Receiver(Protocol):
    """The part of an engine that a publish talks to."""

    async def pause(self, mode: PauseMode) -> None: ...

    async def receive(self, plan: WeightPlan) -> None: ...

    async def resume(self) -> None: ...


PauseMode = Literal["finish", "keep", "recompute", "abort"]
"""What happens to running requests while weights change: let them end, freeze them and keep their
KV cache, freeze them and compute it anew, or end them with what they have, to be asked for again
from there."""
