"""Starts worker groups of either runtime for the same tests."""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from cluster_workers import open_files

from paceline.cluster.base import WorkerSpec
from paceline.cluster.local import LocalGroup
from paceline.cluster.members import Limits
from paceline.cluster.objects import Kept, keep_here
from paceline.cluster.placement import Need
from paceline.cluster.ray import RayCluster, connected
from paceline.cluster.ray_group import RayGroup, keep_in_ray
from paceline.cluster.settings import ClusterConfig

LIMITS = Limits(start_s=60.0, call_s=60.0, settle_s=0.5, cancel_s=0.5, close_s=10.0)
ENV = {"OF_ALL": "given"}
LOGICAL_GPUS = 8


class Starter(Protocol):
    async def start(self, stack: AsyncExitStack, spec: WorkerSpec, **limits: float) -> Any:
        """A group that the stack closes."""

    def tells(self, message: str, words: str) -> bool:
        """Whether the message says how a process ended, as far as the runtime knows it."""

    def keep(self, value: Any) -> Kept:
        """For workers of that runtime."""

    async def until_all_is_freed(self) -> None:
        """Returns when no memory is taken for messages."""


class LocalStarter:
    """Of child processes on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def start(self, stack: AsyncExitStack, spec: WorkerSpec, **limits: float) -> Any:
        own = replace(LIMITS, **limits)
        group = await LocalGroup.start(spec, self.folder, env=ENV, limits=own)
        stack.push_async_callback(group.aclose)
        return group

    def tells(self, message: str, words: str) -> bool:
        return words in message

    def keep(self, value: Any) -> Kept:
        return keep_here(value)

    async def until_all_is_freed(self) -> None:
        assert not [name for name in open_files() if "memfd" in name]

    def leftovers(self) -> list[str]:
        """Worker processes of this one that are still there."""
        listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
        own = f"worker_main {os.getpid()}"
        return [line for line in listed.stdout.splitlines() if own in line]


class RayStarter:
    """Of actors of a Ray cluster that was started before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cluster: RayCluster | None = None

    @contextmanager
    def cluster_is_there(self) -> Iterator[None]:
        """The cluster, and the part of it that the tests of groups use."""
        ray = importlib.import_module("ray")
        config = ClusterConfig(runtime="ray", env=ENV)
        with connected(config, num_gpus=LOGICAL_GPUS):
            needs = [Need("workers", 2, on_gpu=False)]
            opening = RayCluster.open(config, needs, self.folder, LIMITS)
            self._cluster = asyncio.run(opening)
            try:
                yield
            finally:
                asyncio.run(self._cluster.aclose())
                assert ray.is_initialized()

    async def start(self, stack: AsyncExitStack, spec: WorkerSpec, **limits: float) -> Any:
        assert self._cluster is not None
        group = await RayGroup.start(
            spec,
            self.folder,
            devices=self._cluster.devices("workers")[: spec.size],
            nodes=self._cluster.nodes,
            env=ENV,
            limits=replace(LIMITS, **limits),
        )
        stack.push_async_callback(group.aclose)
        return group

    def tells(self, message: str, words: str) -> bool:
        return "ended" in message

    def keep(self, value: Any) -> Kept:
        return keep_in_ray(value)

    async def until_all_is_freed(self) -> None:
        ray = importlib.import_module("ray")
        name = "object_store_memory"
        await until(lambda: ray.available_resources()[name] == ray.cluster_resources()[name])


async def until(is_so: Callable[[], bool]) -> None:
    """For what tells nobody: files, processes, Ray's books."""
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
