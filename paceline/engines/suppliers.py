"""Where the replicas of an engine come from: servers that are started, or attached to."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from paceline.engines.base import ServedEngineConfig
from paceline.engines.http import JsonClient, LostServerError
from paceline.engines.owned import OwnedServer
from paceline.engines.replica import Front, Replica, Supplier, WeightIntake
from paceline.engines.router import RoutedEngine
from paceline.engines.server import Launcher, LocalLauncher, ServerCommand, wait_until_healthy
from paceline.errors import EngineError
from paceline.network import is_loopback


class StatedWeights(WeightIntake, Protocol):
    """Of a server that can be told what it holds."""

    async def state(self, version: int) -> None:
        """Say which version it holds, without a change of weights."""


class NewReplica(Replica, Protocol):
    """A replica whose server may not be ready yet."""

    @property
    def weights(self) -> StatedWeights: ...

    async def look(self) -> None:
        """Learn what the server is like. Raises LostServerError while it is not healthy, and
        EngineError if it can not be this engine's."""


MakeReplica = Callable[[str, int, bool], NewReplica]
"""Url, number among the replicas of the engine, whether this program started it."""
MakeCommand = Callable[[int, int], ServerCommand]
"""Number of the replica, version of the weights in the model's folder."""


def key_for(config: ServedEngineConfig) -> str | None:
    """What servers ask for that are open to the network, where this program starts them."""
    return None if config.urls or is_loopback(config.host) else secrets.token_urlsafe(32)


def client_with(key: str | None) -> JsonClient:
    return JsonClient({"Authorization": f"Bearer {key}"} if key else None)


async def open_servers(
    config: ServedEngineConfig,
    *,
    kind: str,
    policy: str,
    version: int,
    device: str,
    client: JsonClient,
    command: MakeCommand,
    replica: MakeReplica,
    launch: Launcher | None,
    folder: Path,
    front: Front | None = None,
) -> RoutedEngine:
    """The engine, all of whose replicas are healthy. Its `aclose` ends what was started, and the
    client.

    kind: of the servers, for messages. version: of the weights in the model's folder. launch:
    default: child processes of this one. folder: for the servers' logs. front: chooses among the
    replicas; ended with them.
    """
    limit_s = config.start_timeout_s
    suppliers: list[Supplier] = [
        Attached(replica(url.rstrip("/"), index, False), timeout_s=limit_s)
        for index, url in enumerate(config.urls)
    ]
    if not config.urls:
        launcher = launch or LocalLauncher(folder)
        suppliers += [
            Started(
                OwnedServer(
                    f"{kind} server {index} of policy {policy!r}",
                    launcher,
                    timeout_s=limit_s,
                    folder=folder,
                ),
                command,
                replica,
                index=index,
            )
            for index in range(config.replicas)
        ]
    engine = RoutedEngine(
        suppliers,
        policy=policy,
        version=version,
        retries=config.retries,
        backend="nccl" if device == "cuda" else "gloo",
        return_timeout_s=limit_s,
        front=front,
        close=client.aclose,
    )
    try:
        await engine.open()
    except BaseException:
        await engine.aclose()
        raise
    return engine


class Started:
    """A server that is started here. Implements `paceline.engines.replica.Supplier`."""

    is_ours = True

    def __init__(
        self, server: OwnedServer, command: MakeCommand, replica: MakeReplica, *, index: int
    ) -> None:
        self.name = server.name
        self._server, self._command, self._replica = server, command, replica
        self._index = index

    async def start(self, version: int) -> NewReplica:
        replica = await self._server.start(
            self._command(self._index, version),
            lambda url: self._replica(url, self._index, True),
            lambda replica: replica.look(),
        )
        try:
            await _state(replica, version)
        except BaseException:
            await self.stop()
            raise
        return replica

    async def problem(self) -> str | None:
        return await self._server.problem()

    async def stop(self) -> None:
        await self._server.stop()


class Attached:
    """A server that somebody else runs. Implements `paceline.engines.replica.Supplier`."""

    is_ours = False

    def __init__(self, replica: NewReplica, *, timeout_s: float) -> None:
        self.name = replica.name
        self._replica, self._timeout_s = replica, timeout_s

    async def start(self, version: int) -> NewReplica:
        await wait_until_healthy(
            _Foreign(self.name),
            self._replica.look,
            name=self.name,
            timeout_s=self._timeout_s,
            where="\nSee that a server runs there, or correct engine.urls.",
        )
        # It is taken to hold what the engine begins with; one that its owner starts again later
        # says something else.
        await _state(self._replica, version)
        return self._replica

    async def problem(self) -> str | None:
        return None

    async def stop(self) -> None:
        """It is not ours to end."""


async def _state(replica: NewReplica, version: int) -> None:
    try:
        await replica.weights.state(version)
    except LostServerError as error:
        raise EngineError(str(error)) from error


class _Foreign:
    """A server of which no more is known than where it is."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def ended(self) -> str | None:
        return None

    async def last_output(self) -> str:
        return ""

    async def aclose(self) -> None: ...
