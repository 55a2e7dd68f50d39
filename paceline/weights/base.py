"""The weight seam: a publish is one transaction over all engines of a policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

Transport = Literal["shared", "copy", "handles", "collective", "disk"]
"""In one process: `shared`: engine and trainer hold the same storage; `copy`: tensors are copied.
Between processes: `handles`: flat buckets in memory that both can map, of a GPU (CUDA IPC) or of a
CPU host (shared memory); `collective`: a broadcast over the network, NCCL or gloo; `disk`: files in
a folder that both can read."""


BUCKET_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """One publish: which version, over which transport."""

    policy: str
    version: int
    transport: Transport
    tensors: Mapping[str, Tensor] | None = None
    """For in-process transports: Hugging Face name -> tensor, as the trainer holds them."""
    source: WeightSource | None = None
    """For transports between processes: the sender's end."""
    bucket_bytes: int = BUCKET_BYTES
    """For transports between processes: how much is on its way at one time."""
    folder: Path | None = None
    """For `disk`: a folder that the sender keeps the newest weights in. Nothing else is in it."""
    dtype: str | None = None
    """For transports between processes: type that floating-point numbers are sent in, such as
    `bfloat16`; None: that in which the trainer holds them."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor without its numbers."""

    name: str
    """As a Hugging Face checkpoint names it."""
    dtype: str
    """As torch names it, without the module: `bfloat16`."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parcel:
    """Some of the tensors of a publish, on their way. Travels between processes by pickle."""

    tensors: tuple[TensorInfo, ...]
    handles: tuple[str, ...] = ()
    """`handles`: one for each device of the trainer, by its rank there: base64 of a pickled
    list of (name, tensor), whose tensors are views of one flat bucket."""
    folder: str | None = None
    """`disk`: holds these tensors as safetensors files, with the model's configuration."""
    changed: str | None = None
    """`disk`: a folder with only what differs from the former publish, for receivers that hold
    that one. Absent if it is not known that all of them do."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """A process group of one sender, rank 0, and the devices of all receivers."""

    name: str
    address: str
    port: int
    size: int
    """Members, the sender among them."""
    backend: Literal["nccl", "gloo"]


class WeightSource(Protocol):
    """The sender's end of one publish, for receivers in other processes.

    A receiver of several replicas goes through the parcels once and hands each to all of them:
    memory is bounded by one bucket.
    """

    def parcels(self) -> AsyncIterator[Parcel]:
        """All tensors, each once. A parcel is valid until the next one is asked for."""

    async def meeting_point(self) -> tuple[str, int]:
        """`collective`: address and a free port of the sender, for a new meeting."""

    async def meet(self, meeting: Meeting) -> None:
        """`collective`: join as rank 0; returns when all have. The group stays for later
        publishes; one of another name replaces it."""

    async def broadcast(self, parcel: Parcel) -> None:
        """`collective`: send the newest parcel to the group; returns when it has left."""

    async def checksums(self) -> Mapping[str, str]:
        """Name of each tensor -> hash; see `weights.tensors.checksums`."""

    async def numbers(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Copies of some of the tensors, on the host, in the type in which they are sent."""


class Receiver(Protocol):
    """The part of an engine that a publish talks to."""

    async def pause(self, mode: PauseMode) -> None: ...

    async def receive(self, plan: WeightPlan) -> None: ...

    async def resume(self) -> None: ...


PauseMode = Literal["finish", "keep", "recompute", "abort"]
"""What happens to running requests while weights change: let them end, freeze them and keep their
KV cache, freeze them and compute it anew, or end them with what they have, to be asked for again
from there."""
