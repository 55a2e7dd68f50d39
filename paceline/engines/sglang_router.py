"""SGLang's own router before the replicas of an engine: it chooses which one makes an answer.

It gets requests for answers alone; everything else goes to the replicas. What it could do besides,
trying again and taking replicas out, is left to the engine, which knows which weights they hold.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.deadline import stop
from paceline.engines.arguments import check_sglang_router, flags_of
from paceline.engines.base import Completion, Request, SGLangEngineConfig
from paceline.engines.http import JsonClient, LostServerError, RefusedError
from paceline.engines.open_requests import OpenRequests
from paceline.engines.owned import OwnedServer
from paceline.engines.replica import Replica
from paceline.engines.served import Served
from paceline.engines.server import HOST, PORT, SECOND_PORT, Launcher, ServerCommand
from paceline.engines.sglang import SGLangReplica
from paceline.engines.sglang_requests import SGLangRequests
from paceline.errors import EngineError

logger = logging.getLogger(__name__)

LONGER_S = 60
"""The engine's own time limit of an answer comes before the router's."""
CONTROL_S, LOOK_S = 15.0, 0.02
SETTLE_S = 30.0
"""Seconds for a replica to be added or taken out."""
STARTS_IN_A_ROW = 3
"""Starts without an answer between."""
DEFAULTS = {"--log-level": "warn"}
NO_PROXY = {"NO_PROXY": "*", "no_proxy": "*"}
MISSING = "No module named 'sglang_router'"
ADVICE = (
    "\nInstall the package sglang-router into the environment of engine.python, or leave "
    "engine.router out."
)


def sglang_router_command(
    config: SGLangEngineConfig, *, policy: str, api_key: str | None = None
) -> ServerCommand:
    """api_key: of the servers, which the router asks for, too. Raises ConfigError for arguments
    that are not the user's to set."""
    check_sglang_router(config.router_arguments)
    argv = [config.python or sys.executable, "-m", "sglang_router.launch_router"]
    # Metrics can not be turned off, and are open to the network where nothing is said.
    argv += ["--host", HOST, "--port", PORT]
    argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", SECOND_PORT]
    argv += ["--request-timeout-secs", str(math.ceil(config.request_timeout_s) + LONGER_S)]
    argv += ["--disable-retries", "--disable-circuit-breaker", "--disable-health-check"]
    if api_key is not None:
        argv += ["--api-key", api_key]
    given = set(flags_of(config.router_arguments))
    for flag, value in DEFAULTS.items():
        if flag not in given:
            argv += [flag, value]
    return ServerCommand(
        name=f"{policy}-sglang-router",
        argv=(*argv, *config.router_arguments),
        env={**NO_PROXY, **config.env},
        host="127.0.0.1" if config.urls else config.host,
    )


class SGLangRouter:
    """Implements `paceline.engines.replica.Front` over `SGLangReplica`s."""

    def __init__(
        self,
        config: SGLangEngineConfig,
        client: JsonClient,
        served: Served,
        *,
        launch: Launcher,
        folder: Path,
        api_key: str | None = None,
    ) -> None:
        """launch: starts it. folder: for its log. api_key: of the servers."""
        self._command = sglang_router_command(config, policy=served.policy, api_key=api_key)
        self._client, self._key = client, api_key
        self._server = OwnedServer(
            f"the SGLang router of policy {served.policy!r}",
            launch,
            timeout_s=config.start_timeout_s,
            folder=folder,
        )
        self.open = OpenRequests(client, self._abort)
        """Requests of the router, which may be open at any of the replicas."""
        self._requests = SGLangRequests(client, served, self.open)
        self._url: str | None = None
        self._settling: asyncio.Task[None] | None = None
        self._behind: Mapping[str, SGLangReplica] = {}
        """Replicas that get requests, by url."""
        self._once_behind: dict[str, SGLangReplica] = {}
        """Those that may have requests open."""
        self._is_sure, self._is_closed = False, False
        self._starts = 0

    async def serve(self, replicas: Callable[[], Sequence[Replica]]) -> None:
        while not self._is_settled(wanted := _by_url(replicas())):
            if self._is_closed:
                raise LostServerError(f"{self._server.name} is closed")
            if self._settling is None or self._settling.done():
                self._settling = asyncio.create_task(self._settle(wanted), name="settle a router")
                self._settling.add_done_callback(_see)
            # Others wait for it too, or have requests open: who gives up gives up for itself alone.
            await asyncio.shield(self._settling)  # ends: by the limits of a start and of `_settle`

    async def generate(self, request: Request, version: int) -> Completion:
        if self._url is None or not self._behind:
            raise LostServerError(f"{self._server.name} has no replica to ask")
        url, behind = self._url, self._behind.values()
        is_salted = any(replica.weights.salt is not None for replica in behind)
        try:
            made = await self._requests.answer(
                url,
                request,
                longest_prompt=min(replica.longest_prompt for replica in behind),
                version=version,
                salt=f"version {version}" if is_salted else None,
            )
        except LostServerError:
            if url == self._url:
                self._is_sure = False
            raise
        self._starts = 0
        return made

    async def aclose(self) -> None:
        self._is_closed, self._is_sure, self._url = True, False, None
        if self._settling is not None:
            await stop(self._settling)
        await self._server.stop()

    def _is_settled(self, wanted: Mapping[str, SGLangReplica]) -> bool:
        return self._is_sure and wanted.keys() == self._behind.keys()

    async def _settle(self, wanted: Mapping[str, SGLangReplica]) -> None:
        """Make the router's replicas these. What does not come about ends it: what it would do in
        the end is not known."""
        self._is_sure = False
        url = await self._running()
        if not len(self.open):
            self._once_behind.clear()
        self._once_behind |= wanted
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._bring_behind(url, wanted)
        except BaseException as error:
            await self._server.stop()
            if not isinstance(error, LostServerError | RefusedError | TimeoutError):
                raise
            reason = str(error) or f"it took longer than {SETTLE_S:g} s"
            raise LostServerError(
                f"{self._server.name} could not be given its replicas: {reason}"
            ) from error
        self._behind, self._is_sure = dict(wanted), True

    async def _running(self) -> str:
        """The url of the router that runs, or of a new one."""
        end = await self._server.problem()
        if end is None and self._url is not None:
            return self._url
        if self._url is not None:
            logger.warning("%s; starting it again", end)
        self._url = None
        if self._starts >= STARTS_IN_A_ROW:
            told = f"{end}\nIt was started {self._starts} times without an answer between"
            raise EngineError(told) from EngineError(told)
        self._starts += 1
        try:
            self._url = await self._server.start(self._command, str, self._look)
        except EngineError as error:
            told = f"{error}{ADVICE if MISSING in str(error) else ''}"
            raise EngineError(told) from error
        return self._url

    async def _look(self, url: str) -> None:
        try:
            await self._client.request(url, "/liveness", timeout_s=CONTROL_S)
        except RefusedError as error:
            raise EngineError(f"{error}: is that a router of SGLang?") from None

    async def _bring_behind(self, url: str, wanted: Mapping[str, SGLangReplica]) -> None:
        there = await self._workers(url)
        for name, number in there.items():
            if name not in wanted:
                await self._ask(url, f"/workers/{number}", method="DELETE")
        for name in wanted:
            if name not in there:
                key = {} if self._key is None else {"api_key": self._key}
                await self._ask(url, "/workers", {"url": name} | key)
        while True:
            if (await self._workers(url)).keys() == wanted.keys():
                return
            await asyncio.sleep(LOOK_S)

    async def _workers(self, url: str) -> dict[str, str]:
        """Url and id of the replicas that it hands requests to."""
        found = await self._ask(url, "/workers")
        try:
            return {w["url"]: w["id"] for w in found["workers"] if w["is_healthy"]}
        except (KeyError, TypeError) as error:
            raise LostServerError(f"{url} lists its replicas in an unknown way") from error

    async def _ask(self, url: str, path: str, body: Any = None, method: str | None = None) -> Any:
        return await self._client.request(url, path, body, timeout_s=CONTROL_S, method=method)

    async def _abort(self, rids: Sequence[str]) -> None:
        """At all replicas, since it is not known which one has them; what is lost has none."""
        # ends: each by the time limits of its replica
        await asyncio.gather(
            *(replica.abort(rids) for replica in self._once_behind.values()),
            return_exceptions=True,
        )


def _see(settled: asyncio.Task[None]) -> None:
    """Its error is raised to who waits for it; where all have given up, nobody does."""
    if not settled.cancelled():
        settled.exception()


def _by_url(replicas: Sequence[Replica]) -> dict[str, SGLangReplica]:
    return {r.name: r for r in replicas if isinstance(r, SGLangReplica)}
