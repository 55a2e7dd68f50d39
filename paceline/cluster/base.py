"""The worker seam: a group of processes, one a rank, each holding one object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.cluster.objects import Kept
from paceline.cluster.placement import Device
from paceline.engines.server import Launcher


@dataclass(frozen=True, slots=True)
class Rank:
    """What a worker knows of its place in the group."""

    index: int
    size: int
    address: str
    """Where rank 0 listens for the process group."""
    port: int
    device: str
    """`cpu`, or `cuda:0`: the worker sees no GPU but its own."""
    host: str
    """Address of the worker's own machine."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a group is made of."""

    name: str
    """For messages, logs and process titles: `trainer of solver`."""
    make: Callable[..., Any]
    """Called in each worker as `make(rank, **arguments)`; its public methods can be called from
    outside. A module-level function or class, found by its name. An `aclose` or `close` of the
    object is called at the end."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    size: int = 1
    threads: int | None = None
    """CPU threads of each worker."""
    env: Mapping[str, str] = field(default_factory=dict)


class WorkerGroup(Protocol):
    """Processes that are called together."""

    @property
    def size(self) -> int: ...

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call it on all ranks with the same arguments; results by rank.

        An error of a rank is raised here: a PacelineError as it was raised there, another one as a
        WorkerError with the rank and its traceback. A rank that died is a WorkerError with how it
        ended and its last output. Other ranks are let settle first; where they wait for a dead
        one, they are ended. Cancelling the call lets the workers end what they do at their next
        check, or ends them after a grace.
        """

    async def scatter(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The same, with arguments of its own for each rank."""

    async def aclose(self) -> None:
        """End all processes: asked, then terminated, then killed. Idempotent."""


class Cluster(Protocol):
    """Where the processes of a run are started. What each needs was given when it was opened."""

    def devices(self, name: str) -> tuple[Device, ...]:
        """Of the need of that name, one a rank."""

    async def start(self, spec: WorkerSpec, devices: Sequence[Device]) -> WorkerGroup:
        """Start a process on each device, and make the object in each.

        Raises what making it raises, a WorkerError if a process dies, and a DeadlineError after
        `cluster.start_timeout_s`; nothing is left behind then.
        """

    def launcher(self, devices: Sequence[Device]) -> Launcher:
        """Starts the servers of one engine: replica r of n devices gets those from r * n on."""

    def keep(self, value: Any) -> AbstractAsyncContextManager[Kept]:
        """A value that travels once, for arguments of several calls; see `objects`."""

    async def aclose(self) -> None:
        """Give back what was taken. Groups and servers are closed before, by who started them.
        Idempotent."""
