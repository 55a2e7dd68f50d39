"""Which devices of which nodes everybody gets. Pure: nodes and needs in, devices out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError

LOCAL_NODE = "local"


@dataclass(frozen=True, slots=True)
class Node:
    """A machine."""

    name: str
    """What its runtime calls it; `local` for this one."""
    address: str
    gpus: int = 0
    cpus: float = 1.0


@dataclass(frozen=True, slots=True)
class Device:
    """Where one rank stands."""

    node: str
    gpu: int | None = None
    """Number of the GPU among those that the run may use on that node; None: CPU."""


@dataclass(frozen=True, slots=True)
class Need:
    """What one trainer or engine needs.

    Example: two servers of tensor-parallel size 4 are
    `Need("engine of solver", 8, group=4, share="solver")`.
    """

    name: str
    """Unique: `trainer of solver`."""
    size: int
    """Devices in all, one a rank."""
    group: int = 1
    """Neighbours that must stand on one node: the tensor-parallel size of an engine."""
    share: str = ""
    """Needs with the same word share their devices, the first of each with the first. Empty: has
    its own."""
    on_gpu: bool = True
    """False: runs on a CPU, of which there are always enough."""


def place(needs: Sequence[Need], nodes: Sequence[Node]) -> dict[str, tuple[Device, ...]]:
    """Devices of each need, by its name.

    Neighbouring ranks stand on one node where they can; nodes are filled in the given order. Needs
    on CPUs are spread over the nodes by their number of CPUs.

    Raises ConfigError if there are not enough GPUs, or not enough of them together on one node.
    """
    free = {node.name: list(range(node.gpus)) for node in nodes}
    placed: dict[str, tuple[Device, ...]] = {}
    shared = _by_share([need for need in needs if need.on_gpu])
    _check_total(shared, nodes)
    for members in sorted(shared, key=_group_of, reverse=True):
        group = _group_of(members)
        devices = _take(members, -(-_size_of(members) // group), group, free)
        placed |= {need.name: tuple(devices[: need.size]) for need in members}
    spread = _Spread(nodes)
    for need in needs:
        if not need.on_gpu:
            placed[need.name] = spread.take(need)
    return placed


def gpus_by_node(placed: Mapping[str, Iterable[Device]]) -> dict[str, int]:
    """How many GPUs of each node are in use; CPU nodes in use have 0."""
    used: dict[str, set[int]] = defaultdict(set)
    for devices in placed.values():
        for device in devices:
            used[device.node] |= set() if device.gpu is None else {device.gpu}
    return {node: len(gpus) for node, gpus in used.items()}


def _by_share(needs: Iterable[Need]) -> list[list[Need]]:
    shared: dict[tuple[str, str], list[Need]] = defaultdict(list)
    for need in needs:
        shared[("share", need.share) if need.share else ("name", need.name)].append(need)
    return list(shared.values())


def _group_of(members: Sequence[Need]) -> int:
    """Neighbours that stay together, so that the groups of every member do."""
    return math.lcm(*(need.group for need in members))


def _size_of(members: Sequence[Need]) -> int:
    return max(need.size for need in members)


def _check_total(shared: Sequence[Sequence[Need]], nodes: Sequence[Node]) -> None:
    asked = sum(_size_of(members) for members in shared)
    available = sum(node.gpus for node in nodes)
    if asked <= available:
        return
    parts = "; ".join(f"{_names_of(members)}: {_size_of(members)}" for members in shared)
    where = ", ".join(f"{node.name} ({node.address}): {node.gpus}" for node in nodes)
    raise ConfigError(
        f"GPUs requested {asked}, available {available}. Requested: {parts}. Available: {where}. "
        f"Lower trainer.ranks, engine.replicas or engine.tensor_parallel, or let engine and "
        f"trainer share devices by cluster.colocate = true"
    )


def _names_of(members: Sequence[Need]) -> str:
    return " with ".join(need.name for need in members)


def _take(
    members: Sequence[Need], num_groups: int, group: int, free: Mapping[str, list[int]]
) -> list[Device]:
    """Devices of one share, group by group."""
    left = _size_of(members)
    devices: list[Device] = []
    for _ in range(num_groups):
        size = min(group, left)
        node = next((name for name, gpus in free.items() if len(gpus) >= size), None)
        if node is None:
            most = max((len(gpus) for gpus in free.values()), default=0)
            raise ConfigError(
                f"{_names_of(members)} needs {size} GPUs on one node, and no node has more than "
                f"{most} left; lower engine.tensor_parallel"
            )
        devices += [Device(node, free[node].pop(0)) for _ in range(size)]
        left -= size
    return devices


class _Spread:
    """Ranks on CPUs: each group goes where the load per CPU is least."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._load = {node.name: 0 for node in nodes}

    def take(self, need: Need) -> tuple[Device, ...]:
        devices: list[Device] = []
        while len(devices) < need.size:
            size = min(need.group, need.size - len(devices))
            node = min(self._nodes, key=lambda n: (self._load[n.name] + size) / max(n.cpus, 1e-9))
            self._load[node.name] += size
            devices += [Device(node.name)] * size
        return tuple(devices)
