"""The processes of one sharded trainer: how they find each other, and what they agree on.

Tensors travel by NCCL between GPUs and by gloo between CPUs; numbers and errors always by gloo, in
a group of their own, so that agreeing waits for no kernel of a GPU.
"""

from __future__ import annotations

import ipaddress
import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from paceline import errors
from paceline.errors import PacelineError, TrainerError


class Seat(Protocol):
    """This process's place among those of its trainer; `paceline.cluster.base.Rank` is one."""

    @property
    def index(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def address(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def host(self) -> str: ...


class Ranks:
    """Implements `paceline.trainers.peers.Peers` over torch's default process group."""

    def __init__(self, seat: Seat, *, replicas: int, timeout_s: float) -> None:
        """Returns when all ranks are there. replicas: how often each shard exists."""
        self.index, self.size = seat.index, seat.size
        self.device = torch.device(seat.device)
        self._replicas = replicas
        _prefer_loopback(seat.address)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.init()  # type: ignore[no-untyped-call]
        limit = timedelta(seconds=timeout_s)
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            init_method=f"tcp://{_in_url(seat.address)}:{seat.port}",
            rank=self.index,
            world_size=self.size,
            timeout=limit,
        )
        self._numbers: Any = dist.new_group(backend="gloo", timeout=limit)

    def most(self, count: int) -> int:
        """The largest of all."""
        return int(self._reduce(torch.tensor(count), dist.ReduceOp.MAX))

    def norm(self, own: float) -> float:
        """L2 norm of a sharded tensor from the norms of all shards."""
        if self.size == 1:
            return own
        squares = self._reduce(torch.tensor(own, dtype=torch.float64).square(), dist.ReduceOp.SUM)
        return math.sqrt(float(squares) / self._replicas)

    def all_true(self, own: bool) -> bool:
        return bool(self._reduce(torch.tensor(int(own)), dist.ReduceOp.MIN))

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """What is done within it, without waiting for other ranks, succeeds on all or fails on all.

        Every rank raises the error of the first one that failed, after all have tried.
        """
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            own = error
        found: list[tuple[str, str] | None] = [None] * self.size
        told = None if own is None else (type(own).__name__, str(own))
        dist.all_gather_object(found, told, group=self._numbers)
        if own is not None:
            raise own
        for rank, failure in enumerate(found):
            if failure is not None:
                raise _remade(failure, f"rank {rank} could not {what}")

    def broadcast(self, tensor: torch.Tensor) -> None:
        """From rank 0, into the tensors of all others, on the ranks' device."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)

    def leave(self) -> None:
        """End this rank's part of the group, if all have done what they do together. Idempotent."""
        if dist.is_initialized():
            with suppress(RuntimeError):  # of a group whose other ranks are gone already
                dist.destroy_process_group()

    def _reduce(self, number: torch.Tensor, operation: Any) -> torch.Tensor:
        if self.size > 1:
            dist.all_reduce(number, operation, group=self._numbers)
        return number


def _remade(failure: tuple[str, str], what: str) -> PacelineError:
    kind = getattr(errors, failure[0], None)
    if isinstance(kind, type) and issubclass(kind, PacelineError):
        error: PacelineError = kind.__new__(kind, failure[1])
        return error
    return TrainerError(f"{what}: {failure[0]}: {failure[1]}")


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _prefer_loopback(address: str) -> None:
    """Keep gloo off the network where all ranks are on this machine, whatever its name means."""
    with suppress(ValueError):
        if not ipaddress.ip_address(address).is_loopback:
            return
        names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        if names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
