"""A stand-in for a vLLM server: its HTTP API, without a model, and with faults on demand.

It makes the tokens 10, 11, 12, ... when it is told to (`advance`), or at once. Run as a program,
`python vllm_stand_in.py HOST PORT`, it is a server process that can be killed.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import os
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

FIRST_TOKEN = 10
PREFIX = "generate-tokens-"
CONFIG: dict[str, Any] = {
    "model_config": {"max_model_len": 1000, "logprobs_mode": "processed_logprobs"},
    "parallel_config": {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "worker_extension_cls": "paceline_vllm.PacelineWeights",
    },
}


class Running:
    """A request that has not been answered."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.limit: int = body["sampling_params"]["max_tokens"]
        self.made = 0
        self.spans: list[tuple[str, int]] = []
        """Version of tokens up to this number; that of the rest is the server's."""
        self.finish: str | None = None
        self.over = asyncio.Event()


class StandIn:
    def __init__(self, *, manual: bool = False) -> None:
        """manual: make tokens only in `advance`."""
        self.manual = manual
        self.calls: list[tuple[str, Any]] = []
        self.headers: dict[str, str] = {}
        """Of the newest request."""
        self.faults: dict[str, Any] = {}
        """Path -> status to answer with, `drop`: cut the connection, or `hang`."""
        self.problems: dict[str, str] = {}
        """Method of the worker extension -> what it complains of."""
        self.running: dict[str, Running] = {}
        self.arrived = asyncio.Event()
        self.version = "default"
        self.paused: dict[str, str] | None = None
        self.config = copy.deepcopy(CONFIG)
        self.weights: dict[str, list[tuple[list[int], list[float]]]] = {}
        """Name -> shape and numbers of the part of each device."""
        self.asleep: set[str] = set()
        self.url = ""

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def bodies(self, path: str) -> list[Any]:
        return [body for called, body in self.calls if called == path]

    @property
    def methods(self) -> list[str]:
        """Of the worker extension, in order."""
        return [body["method"] for body in self.bodies("/collective_rpc")]

    def advance(self, tokens: int = 1) -> None:
        """Each request gets so many tokens, unless the server is paused."""
        if self.paused is None:
            for request in list(self.running.values()):
                request.made = min(request.made + tokens, request.limit)
                if request.made == request.limit:
                    self._end(request, "length")

    async def until(self, count: int) -> None:
        """Wait until so many requests are open."""
        async with asyncio.timeout(10):
            while len(self.running) != count:
                self.arrived.clear()
                await self.arrived.wait()

    async def called(self, path: str, count: int = 1) -> None:
        """Wait until the path has been called so often."""
        async with asyncio.timeout(10):
            while self.paths.count(path) < count:
                self.arrived.clear()
                await self.arrived.wait()

    def _end(self, request: Running, finish: str) -> None:
        request.finish = finish
        request.over.set()

    async def handle(self, http: web.Request) -> web.StreamResponse:
        text, self.headers = await http.text(), dict(http.headers)
        body = json.loads(text) if text else dict(http.query)
        self.calls.append((http.path, body))
        self.arrived.set()
        fault = self.faults.get(http.path)
        if fault == "drop":
            assert http.transport is not None
            http.transport.abort()
        elif fault == "hang":
            await asyncio.Event().wait()
        elif fault is not None:
            return web.json_response({"error": {"message": "as ordered"}}, status=fault)
        if http.path == "/wake_up":
            self.asleep -= set(http.query.getall("tags"))
            self.calls[-1] = (http.path, http.query.getall("tags"))
            return web.json_response({})
        answer = getattr(self, "on_" + http.path.strip("/").replace("/", "_"), None)
        if answer is None:
            return web.Response(status=404)
        return web.json_response(await answer(body))

    async def on_inference_v1_generate(self, body: Any) -> Any:
        if "prompt_logprobs" in body["sampling_params"]:
            entries = [{str(t): {"logprob": -float(t)}} for t in body["token_ids"]]
            return {"choices": [], "prompt_logprobs": [None, *entries[1:]]}
        rid, request = PREFIX + body["request_id"], Running(body)
        self.running[rid] = request
        self.arrived.set()
        if not self.manual:
            self.advance(request.limit)
        try:
            await request.over.wait()
        finally:
            del self.running[rid]
            self.arrived.set()
        tokens = [FIRST_TOKEN + i for i in range(request.made)]
        start, spans = 0, []
        for version, end in [*request.spans, (self.version, len(tokens))]:
            spans.append({"version": version, "start": start, "end": end})
            start = end
        choice = {
            "token_ids": tokens,
            "logprobs": {"content": [{"token_id": t, "logprob": -0.5} for t in tokens]},
            "finish_reason": request.finish,
            "stop_reason": None,
            "weight_versions": spans,
        }
        return {"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 2}}}

    async def on_abort_requests(self, body: Any) -> Any:
        wanted = body.get("request_ids")
        for rid, request in list(self.running.items()):
            if not wanted or rid in wanted:
                self._end(request, "abort")
        return {"status": "aborted"}

    async def on_pause(self, query: Any) -> Any:
        self.paused = query
        return {"status": "paused"}

    async def on_resume(self, body: Any) -> Any:
        self.paused = None
        return {"status": "resumed"}

    async def on_health(self, body: Any) -> Any:
        return None

    async def on_server_info(self, body: Any) -> Any:
        return {"vllm_config": self.config}

    async def on_weight_info(self, body: Any) -> Any:
        return {"weight_version": self.version}

    async def on_update_weight_version(self, body: Any) -> Any:
        for request in self.running.values():
            if request.made:
                request.spans.append((self.version, request.made))
        self.version = body["new_version"]
        return {"success": True}

    async def on_reset_prefix_cache(self, body: Any) -> Any:
        return {"success": not self.running}

    async def on_collective_rpc(self, body: Any) -> Any:
        method = body["method"]
        if (problem := self.problems.get(method)) is not None:
            return {"results": [{"error": problem}]}
        if method == "paceline_read" and (parts := self.weights.get(body["args"][0])):
            return {"results": [_shown(*part) for part in parts]}
        return {"results": [{}]}

    async def on_sleep(self, query: Any) -> Any:
        self.asleep = {"weights", "kv_cache"}
        return {}

    async def on_release_kv_cache_memory(self, body: Any) -> Any:
        self.asleep.add("kv_cache")
        return {}


def _shown(shape: list[int], numbers: list[float]) -> dict[str, Any]:
    data = struct.pack(f"<{len(numbers)}f", *numbers)
    return {"shape": shape, "numbers": base64.b64encode(data).decode()}


@asynccontextmanager
async def stand_in(**options: Any) -> AsyncIterator[StandIn]:
    """A server of this event loop, on a free port of loopback."""
    server = StandIn(**options)
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()


async def _serve(host: str, port: int) -> None:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", StandIn().handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    print(f"serving as process {os.getpid()}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2])))
