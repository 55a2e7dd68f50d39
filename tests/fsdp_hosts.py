"""Ranks of sharded trainers for tests: worker processes that make one trainer after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from trainer_rows import numbers

from paceline.cluster.base import Rank, WorkerSpec
from paceline.cluster.local import LocalGroup
from paceline.cluster.members import Limits
from paceline.cluster.trainer import GroupTrainer
from paceline.network import free_port
from paceline.trainers.base import FSDPTrainerConfig
from paceline.trainers.fsdp import FSDPRank
from paceline.trainers.fsdp_shards import whole
from paceline.types import Batch, Row

Result = TypeVar("Result")
LIMITS = Limits(start_s=100.0, call_s=100.0, settle_s=20.0, close_s=10.0)


class RankHost:
    """Holds one rank after the other, and shows what it holds."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._made: FSDPRank | None = None

    def open(self, port: int, named: dict[str, Any]) -> None:
        self.close()
        self._made = FSDPRank(replace(self._rank, port=port), **named)

    def do(self, method: str, *values: Any) -> Any:
        return getattr(self._made, method)(*values)

    def gradients(self) -> dict[str, torch.Tensor]:
        assert self._made is not None
        core = self._made._core
        found = {
            name: whole(parameter.grad, self._made._ranks.device).cpu().clone()
            for name, parameter in core.model.named_parameters()
            if parameter.grad is not None
        }
        core.optimizer.zero_grad()
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        assert self._made is not None
        named = self._made._core.model.named_parameters()
        return {n: whole(p, self._made._ranks.device).cpu().clone() for n, p in named}

    def moments(self) -> dict[str, torch.Tensor]:
        assert self._made is not None
        core, device = self._made._core, self._made._ranks.device
        return {
            f"{kind}/{name}": whole(tensor, device).cpu().clone()
            for name, parameter in core.model.named_parameters()
            for kind, tensor in core.optimizer.state.get(parameter, {}).items()
        }

    def shares(self) -> bool:
        assert self._made is not None
        return self._made._core.trained.shares_prefixes

    def local_shapes(self) -> dict[str, tuple[int, ...]]:
        assert self._made is not None
        named = self._made._core.model.named_parameters()
        return {n: tuple(p.to_local().shape) for n, p in named}

    def device_bytes(self) -> int:
        return torch.cuda.memory_allocated()

    def poison(self, index: int) -> None:
        """Make the loss of one rank a number that is none."""
        assert self._made is not None
        if self._made._ranks.index == index:
            self._made._core._is_finite = False

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
            self._made = None


IN_THIS_PROCESS = RankHost(Rank(0, 1, "127.0.0.1", 0, "cpu", "127.0.0.1"))
"""The only one: a process is in one default group, whichever fixture made it last."""


class Here:
    """A group of one rank in this process."""

    size = 1
    _host = IN_THIS_PROCESS

    async def call(self, method: str, *values: Any) -> list[Any]:
        return [getattr(self._host, method)(*values)]

    async def scatter(self, method: str, values: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [getattr(self._host, method)(*own) for own in values]

    async def aclose(self) -> None:
        self._host.close()


class Hosted:
    """The group of the ranks that are held."""

    def __init__(self, hosts: Any) -> None:
        self._hosts = hosts

    @property
    def size(self) -> int:
        return self._hosts.size

    async def call(self, method: str, *values: Any) -> list[Any]:
        return await self._hosts.call("do", method, *values)

    async def scatter(self, method: str, values: Sequence[tuple[Any, ...]]) -> list[Any]:
        return await self._hosts.scatter("do", [(method, *own) for own in values])

    async def aclose(self) -> None:
        await self._hosts.call("close")


class Hosts:
    """Makes trainers on the same processes, which take long to start."""

    def __init__(self, runner: asyncio.Runner, group: Any) -> None:
        self._runner = runner
        self.group = group
        self.size: int = group.size

    def run(self, call: Awaitable[Result]) -> Result:
        async def bounded() -> Result:
            async with asyncio.timeout(100.0):
                return await call

        return self._runner.run(bounded())

    def make(
        self,
        source: Any,
        objective: Any,
        *,
        head: Any = "policy",
        horizon: int = 10,
        **settings: Any,
    ) -> GroupTrainer:
        """settings: of the trainer, and `reference` and `tokenizer`."""
        others = {k: settings.pop(k) for k in ("reference", "tokenizer") if k in settings}
        config = FSDPTrainerConfig(**{"lr": 1e-3, "ranks": self.size, **settings})
        named = {
            "config": config,
            "source": source,
            "objective": objective,
            "horizon": horizon,
            **others,
        }
        self.run(self.group.call("open", free_port(), named))
        return GroupTrainer(Hosted(self.group), objective, head)

    def gradients(
        self, trainer: GroupTrainer, rows: Sequence[Row]
    ) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        metrics = numbers(self.run(trainer.forward_backward(Batch("policy", list(rows)))))
        return metrics, self.ask("gradients")

    def ask(self, method: str, *values: Any) -> Any:
        """Of all ranks; the answer of rank 0."""
        return self.run(self.group.call(method, *values))[0]


@contextmanager
def hosts(size: int, logs: Path, gpus: Sequence[int] | None = None) -> Iterator[Hosts]:
    """One rank in this process, or several in processes of their own; with GPUs, one rank each."""
    with asyncio.Runner() as runner:
        if size == 1 and gpus is None:
            group: Any = Here()
        else:
            spec = WorkerSpec("ranks", RankHost, size=size, threads=1)
            group = runner.run(LocalGroup.start(spec, logs, gpus=gpus, limits=LIMITS))
        try:
            yield Hosts(runner, group)
        finally:
            runner.run(group.aclose())
