"""Opening the cluster of a run, and the one that is this machine alone."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from paceline.cluster.base import Cluster, WorkerSpec
from paceline.cluster.local import LocalGroup, visible_gpu
from paceline.cluster.members import Limits
from paceline.cluster.objects import Kept, keep_here, kept_by
from paceline.cluster.placement import LOCAL_NODE, Device, Need, Node, place
from paceline.cluster.ray import RayCluster
from paceline.cluster.settings import ClusterConfig
from paceline.engines.server import Launcher, LocalLauncher
from paceline.network import LOOPBACK


async def open_cluster(config: ClusterConfig, needs: Sequence[Need], folder: Path) -> Cluster:
    """Take what is needed, at once or not at all; `folder` is for what the processes write.

    Raises ConfigError if there is not enough, in seconds and before anything starts.
    """
    limits = Limits(start_s=config.start_timeout_s, call_s=config.call_timeout_s)
    if config.runtime == "ray":
        return await RayCluster.open(config, needs, folder, limits)
    nodes = [Node(LOCAL_NODE, LOOPBACK, gpus=_num_gpus(needs))]
    return LocalCluster(config, place(needs, nodes), folder, limits)


class LocalCluster:
    """This machine: worker groups and servers are child processes."""

    def __init__(
        self,
        config: ClusterConfig,
        placed: Mapping[str, tuple[Device, ...]],
        folder: Path,
        limits: Limits,
    ) -> None:
        self._config = config
        self._placed = placed
        self._folder = folder
        self._limits = limits

    def devices(self, name: str) -> tuple[Device, ...]:
        """See `Cluster.devices`."""
        return self._placed[name]

    async def start(self, spec: WorkerSpec, devices: Sequence[Device]) -> LocalGroup:
        """See `Cluster.start`."""
        gpus = [device.gpu for device in devices if device.gpu is not None]
        return await LocalGroup.start(
            spec,
            self._folder,
            gpus=gpus or None,
            env=self._config.env,
            limits=self._limits,
        )

    def launcher(self, devices: Sequence[Device]) -> Launcher:
        """See `Cluster.launcher`."""
        names = [visible_gpu(device.gpu) for device in devices if device.gpu is not None]
        return LocalLauncher(self._folder, devices=names)

    def keep(self, value: Any) -> AbstractAsyncContextManager[Kept]:
        """See `Cluster.keep`."""
        return kept_by(keep_here, value)

    async def aclose(self) -> None:
        """See `Cluster.aclose`."""


def _num_gpus(needs: Sequence[Need]) -> int:
    if not any(need.on_gpu for need in needs):
        return 0
    count: int = importlib.import_module("torch").cuda.device_count()
    return count
