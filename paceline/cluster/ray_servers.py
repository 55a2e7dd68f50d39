"""Servers on the nodes of a Ray cluster, started by the actors of the nodes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.cluster.placement import Device
from paceline.cluster.ray_group import NodeHandle, load_ray, result_of
from paceline.engines.server import Server, ServerCommand
from paceline.errors import ConfigError, EngineError
from paceline.network import is_loopback

NODE_CALL_TIMEOUT_S = 60.0
WILDCARDS = ("0.0.0.0", "::")


class RayLauncher:
    """Starts servers on the nodes where the devices of an engine are."""

    def __init__(self, devices: Sequence[Device], nodes: Mapping[str, NodeHandle]) -> None:
        self._devices = devices
        self._nodes = nodes

    async def start(self, command: ServerCommand) -> Server:
        """See `Launcher.start`."""
        size = max(command.num_devices, 1)
        own = self._devices[command.replica * size : (command.replica + 1) * size]
        if len(own) < size:
            raise EngineError(f"{command.name} was given no devices in the cluster")
        node = self._nodes[own[0].node]
        host = command.host
        if host in WILDCARDS:
            host = node.address
        elif is_loopback(host) and node.address != driver_address():
            raise ConfigError(
                f"{command.name} stands on {node.address}, which this process can not reach at "
                f'{host}: set engine.host = "0.0.0.0"'
            )
        names = [name for device in own if (name := node.gpu(device)) is not None]
        here = replace(command, host=host, replica=0)  # its share of the devices is cut out here
        number, url = await _of_node(node, node.actor.start_server.remote(here, names))
        return RayServer(node, number, url)


class RayServer:
    """A server that the actor of a node has started."""

    def __init__(self, node: NodeHandle, number: int, url: str) -> None:
        self.url = url
        self._node = node
        self._number = number

    async def ended(self) -> str | None:
        """See `Server.ended`."""
        try:
            how: str | None = await self._ask(self._node.actor.server_ended)
        except EngineError as error:
            return f"is lost: {error}"
        return how

    async def last_output(self) -> str:
        """See `Server.last_output`."""
        try:
            text: str = await self._ask(self._node.actor.server_output)
        except EngineError as error:
            return str(error)
        return text

    async def aclose(self) -> None:
        """See `Server.aclose`."""
        with contextlib.suppress(EngineError):  # with its node it has ended, too
            await self._ask(self._node.actor.close_server)

    async def _ask(self, method: Any) -> Any:
        return await _of_node(self._node, method.remote(self._number))


async def _of_node(node: NodeHandle, reference: Any) -> Any:
    ray = load_ray()
    try:
        async with asyncio.timeout(NODE_CALL_TIMEOUT_S):
            return await result_of(reference)
    except ray.exceptions.RayTaskError as error:
        raise EngineError(f"node {node.address}: {error.cause}") from error
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise EngineError(f"node {node.address} does not answer: {error}") from error


def driver_address() -> str:
    """Of this process, as the nodes reach it."""
    address: str = importlib.import_module("ray.util").get_node_ip_address()
    return address
