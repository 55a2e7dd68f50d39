"""A Ray cluster as the place of a run: joined, or started here and ended with this process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import IO, Any

from paceline.cluster import ray_guard
from paceline.cluster.base import WorkerSpec
from paceline.cluster.members import Limits
from paceline.cluster.objects import Kept, kept_by
from paceline.cluster.placement import Device, Need, Node, gpus_by_node, place
from paceline.cluster.ray_actors import NodeActor
from paceline.cluster.ray_group import (
    NodeHandle,
    RayGroup,
    keep_in_ray,
    load_ray,
    options_on,
    result_of,
)
from paceline.cluster.ray_servers import RayLauncher, driver_address
from paceline.cluster.settings import ClusterConfig
from paceline.engines.server import Launcher
from paceline.errors import ConfigError, WorkerError

logger = logging.getLogger(__name__)

RESERVE_TIMEOUT_S = 15.0
"""For GPUs that are there: longer only if another job has them."""
NODE_START_TIMEOUT_S = 120.0
GUARD_TIMEOUT_S = 15.0
REACH_TIMEOUT_S = 10.0
MARK = "PACELINE_CLUSTER"


class RayCluster:
    """Places of a Ray cluster, taken by this run until it is closed."""

    def __init__(self, config: ClusterConfig, folder: Path, limits: Limits) -> None:
        self._config = config
        self._folder = folder
        self._limits = limits
        self.nodes: dict[str, NodeHandle] = {}
        self._placed: Mapping[str, tuple[Device, ...]] = {}
        self._group: Any = None
        self._leave = contextlib.ExitStack()

    @classmethod
    async def open(
        cls, config: ClusterConfig, needs: Sequence[Need], folder: Path, limits: Limits
    ) -> RayCluster:
        """Join or start the cluster, and take what is needed of it.

        Raises ConfigError if it does not have that, MissingExtraError without Ray, and WorkerError
        if it can not be reached or started.
        """
        cluster = cls(config, folder, limits)
        try:
            cluster._leave.enter_context(connected(config))
            nodes = _nodes_of(load_ray().nodes())
            cluster._placed = place(needs, nodes)
            await cluster._take([n for n in nodes if n.name in gpus_by_node(cluster._placed)])
        except BaseException:
            await cluster.aclose()
            raise
        return cluster

    def devices(self, name: str) -> tuple[Device, ...]:
        """Of the need of that name."""
        return self._placed[name]

    async def start(self, spec: WorkerSpec, devices: Sequence[Device]) -> RayGroup:
        """See `Cluster.start`."""
        return await RayGroup.start(
            spec,
            self._folder,
            devices=devices,
            nodes=self.nodes,
            env=self._config.env,
            limits=self._limits,
        )

    def launcher(self, devices: Sequence[Device]) -> Launcher:
        """See `Cluster.launcher`."""
        return RayLauncher(devices, self.nodes)

    def keep(self, value: Any) -> AbstractAsyncContextManager[Kept]:
        """See `Cluster.keep`."""
        return kept_by(keep_in_ray, value)

    async def aclose(self) -> None:
        """See `Cluster.aclose`."""
        if not self.nodes and self._group is None:
            self._leave.close()
            return
        ray = load_ray()
        try:
            for node in self.nodes.values():
                ray.kill(node.actor, no_restart=True)
            if self._group is not None:
                importlib.import_module("ray.util").remove_placement_group(self._group)
        finally:
            self.nodes, self._group = {}, None
            self._leave.close()

    async def _take(self, nodes: Sequence[Node]) -> None:
        """Reserve the devices; one actor a node holds them and looks after the rest."""
        if not nodes:
            return
        util = importlib.import_module("ray.util")
        gpus = gpus_by_node(self._placed)
        bundles = [_bundle(node, gpus[node.name]) for node in nodes]
        # By name: several nodes may stand at one address.
        labels = [{"ray.io/node-id": node.name} for node in nodes]
        self._group = util.placement_group(bundles, strategy="PACK", bundle_label_selector=labels)
        try:
            async with asyncio.timeout(RESERVE_TIMEOUT_S):
                await result_of(self._group.ready())
        except TimeoutError:
            free = load_ray().available_resources().get("GPU", 0)
            raise ConfigError(
                f"GPUs requested {sum(gpus.values())}, available now {free:g}: other jobs of the "
                f"cluster have the rest. Wait for them, or ask for fewer"
            ) from None
        where = ", ".join(f"{node.address} ({gpus[node.name]} GPUs)" for node in nodes)
        logger.info("places in the Ray cluster: %s", where)
        for index, node in enumerate(nodes):
            self.nodes[node.name] = await self._take_node(index, node, gpus[node.name])

    async def _take_node(self, index: int, node: Node, num_gpus: int) -> NodeHandle:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        strategy = strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=index
        )
        options = options_on(node.name, self._config.env)
        options |= {"num_gpus": num_gpus, "scheduling_strategy": strategy}
        actor = load_ray().remote(NodeActor).options(**options).remote(str(self._folder), sys.path)
        try:
            async with asyncio.timeout(NODE_START_TIMEOUT_S):
                names = await result_of(actor.gpus.remote())
        except (load_ray().exceptions.RayError, TimeoutError) as error:
            raise WorkerError(f"node {node.address} of the Ray cluster: {error}") from error
        return NodeHandle(node.name, node.address, actor, tuple(names))


@contextlib.contextmanager
def connected(config: ClusterConfig, *, num_gpus: int | None = None) -> Iterator[None]:
    """This process is in the cluster. One that is started here ends with it, whatever happens.

    num_gpus: of this machine, if it is started here; default: as many as Ray sees.

    Raises WorkerError if the cluster can not be reached or started.
    """
    ray = load_ray()
    if ray.is_initialized():
        yield
        return
    address = config.address or os.environ.get("RAY_ADDRESS")
    with contextlib.ExitStack() as stack:
        guard: IO[bytes] | None = None
        more: dict[str, Any] = {}
        if address in (None, "local"):
            guard = stack.enter_context(_started_here())
            address, more = "local", {"include_dashboard": False, "num_gpus": num_gpus}
        else:
            _check_reachable(address)
        stack.callback(ray.shutdown)
        with _own_signals():
            try:
                context = ray.init(address, log_to_driver=False, logging_level="WARNING", **more)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise WorkerError(
                    f"the Ray cluster at {address!r} can not be reached or started: {error}"
                ) from error
        if guard is not None:
            guard.write(context.address_info["session_dir"].encode())
            guard.flush()
        yield


def _check_reachable(address: str) -> None:
    """Raise WorkerError within seconds; Ray itself tries for minutes."""
    if "://" in address:
        raise WorkerError(
            f"cluster.address = {address!r}: Ray's client protocol can not be used; start the run "
            f"on a node of the cluster, or by `ray job submit`, with HOST:PORT of its head"
        )
    host, _, port = address.rpartition(":")
    if address == "auto" or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_TIMEOUT_S).close()
    except OSError as error:
        raise WorkerError(
            f"nothing answers at {address}, the address of the Ray cluster ({error}): look at "
            f"cluster.address or RAY_ADDRESS, and at `ray status` on its head"
        ) from error


@contextlib.contextmanager
def _started_here() -> Iterator[IO[bytes]]:
    """Processes that are started now are marked, and a guard ends them all at the end.

    Gives the pipe that the guard is to be told the session's folder by.
    """
    mark = uuid.uuid4().hex
    command = [sys.executable, "-I", "-S", str(ray_guard.__file__), f"{MARK}={mark}"]
    quiet = subprocess.DEVNULL
    guard = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
    )
    before = {name: os.environ.get(name) for name in (MARK, "RAY_USAGE_STATS_ENABLED")}
    os.environ[MARK] = mark
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    assert guard.stdin is not None
    try:
        yield guard.stdin
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        guard.stdin.close()
        try:
            guard.wait(timeout=GUARD_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("the guard of the Ray cluster (process %d) did not end", guard.pid)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


def _nodes_of(listed: Sequence[Mapping[str, Any]]) -> list[Node]:
    """Living nodes, the driver's own first: small runs stay there."""
    own = driver_address()
    nodes = [
        Node(
            name=entry["NodeID"],
            address=entry["NodeManagerAddress"],
            gpus=int(entry["Resources"].get("GPU", 0)),
            cpus=float(entry["Resources"].get("CPU", 0)),
        )
        for entry in listed
        if entry["Alive"]
    ]
    return sorted(nodes, key=lambda node: (node.address != own, node.address, node.name))


def _bundle(node: Node, num_gpus: int) -> dict[str, float]:
    place = {f"node:{node.address}": 0.001}
    return place | ({"GPU": float(num_gpus)} if num_gpus else {})
