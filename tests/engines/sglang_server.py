"""A stand-in for an SGLang server: its HTTP API, without a model, and with faults on demand.

It makes the tokens 10, 11, 12, ... when it is told to (`advance`), or at once. Run as a program,
`python sglang_server.py HOST PORT`, it is a server process that can be killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

FIRST_TOKEN = 10


class Running:
    """A request that has not been answered."""

    def __init__(self, body: dict[str, Any], version: str) -> None:
        self.body = body
        self.limit: int = body["sampling_params"]["max_new_tokens"]
        self.made = 0
        self.spans: list[tuple[str, int]] = []
        """Version of tokens up to this number; that of the rest is the server's."""
        self.version = version
        self.finish: dict[str, Any] | None = None
        self.over = asyncio.Event()


class StandIn:
    def __init__(self, *, manual: bool = False, has_spans: bool = True) -> None:
        """manual: make tokens only in `advance`."""
        self.manual, self.has_spans = manual, has_spans
        self.needs_sessions = True
        self.calls: list[tuple[str, Any]] = []
        self.headers: dict[str, str] = {}
        """Of the newest request."""
        self.faults: dict[str, Any] = {}
        """Path -> status to answer with, `drop`: cut the connection, or `hang`."""
        self.running: dict[str, Running] = {}
        self.arrived = asyncio.Event()
        self.version = "0"
        self.paused: str | None = None
        self.session = False
        self.groups: set[str] = set()
        self.info: dict[str, Any] = {"tp_size": 1, "max_req_input_len": 1000, "version": "0.5.21"}
        self.url = ""
        self.weights: dict[str, list[Any]] = {}

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def bodies(self, path: str) -> list[Any]:
        return [body for called, body in self.calls if called == path]

    def advance(self, tokens: int = 1) -> None:
        """Each request gets so many tokens, unless the server is paused."""
        if self.paused is None:
            for request in list(self.running.values()):
                request.made = min(request.made + tokens, request.limit)
                if request.made == request.limit:
                    self._end(request, {"type": "length", "length": request.limit})

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

    def _end(self, request: Running, finish: dict[str, Any]) -> None:
        request.finish = finish
        request.over.set()

    async def handle(self, http: web.Request) -> web.StreamResponse:
        text, self.headers = await http.text(), dict(http.headers)
        body = json.loads(text) if text else None
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
        answer = getattr(self, "on_" + http.path.strip("/"), None)
        if answer is None:
            return web.Response(status=404)
        found = await answer(body)
        if isinstance(found, web.StreamResponse):
            return found
        return web.json_response(found)

    async def on_generate(self, body: Any) -> Any:
        if body["sampling_params"]["max_new_tokens"] == 0:
            entries = [[None if i == 0 else -float(t), t, None] for i, t in
                       enumerate(body["input_ids"])]  # fmt: skip
            return {"meta_info": {"input_token_logprobs": entries}}
        request = Running(body, self.version)
        self.running[body["rid"]] = request
        self.arrived.set()
        if not self.manual:
            self.advance(request.limit)
        try:
            await request.over.wait()
        finally:
            del self.running[body["rid"]]
            self.arrived.set()
        return self._answer(request)

    def _answer(self, request: Running) -> dict[str, Any]:
        tokens = [FIRST_TOKEN + i for i in range(request.made)]
        meta: dict[str, Any] = {
            "finish_reason": request.finish,
            "weight_version": self.version,
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "cached_tokens": 0,
        }
        if self.has_spans:
            start, spans = 0, []
            for version, end in [*request.spans, (self.version, len(tokens))]:
                spans.append({"version": version, "start": start, "end": end})
                start = end
            meta["weight_versions"] = spans
        return {"output_ids": tokens, "meta_info": meta}

    async def on_abort_request(self, body: Any) -> Any:
        for rid, request in list(self.running.items()):
            if body.get("abort_all") or rid == body.get("rid"):
                self._end(request, {"type": "abort", "message": "Abort in server"})
        return {}

    async def on_pause_generation(self, body: Any) -> Any:
        self.paused = body["mode"]
        return {"status": "ok"}

    async def on_continue_generation(self, body: Any) -> Any:
        self.paused = None
        return {"status": "ok"}

    async def on_health(self, body: Any) -> Any:
        return {}

    async def on_health_generate(self, body: Any) -> Any:
        return {}

    async def on_model_info(self, body: Any) -> Any:
        return {"weight_version": self.version}

    async def on_server_info(self, body: Any) -> Any:
        return self.info

    async def on_begin_weight_update(self, body: Any) -> Any:
        if not self.needs_sessions:
            return web.Response(status=404)
        if self.session:
            return _refused("a weight-update session is already open")
        self.session = True
        return {"success": True}

    async def on_end_weight_update(self, body: Any) -> Any:
        if not self.session:
            return _refused("no weight-update session is open")
        self.session = False
        return {"success": True}

    async def on_update_weights_from_tensor(self, body: Any) -> Any:
        if self.needs_sessions and not self.session:
            return _refused("must run between begin and end")
        return {"success": True}

    async def on_update_weights_from_distributed(self, body: Any) -> Any:
        if body["group_name"] not in self.groups:
            return _refused(f"group {body['group_name']} is not known")
        return await self.on_update_weights_from_tensor(body)

    async def on_update_weights_from_disk(self, body: Any) -> Any:
        return {"success": True}

    async def on_init_weights_update_group(self, body: Any) -> Any:
        self.groups.add(body["group_name"])
        return {"success": True}

    async def on_destroy_weights_update_group(self, body: Any) -> Any:
        self.groups.discard(body["group_name"])
        return {"success": True}

    async def on_flush_cache(self, body: Any) -> Any:
        if self.running:
            return web.Response(status=400, text="Flush cache failed.")
        return web.Response(text="Cache flushed.")

    async def on_update_weight_version(self, body: Any) -> Any:
        for request in self.running.values():
            if request.made:
                request.spans.append((self.version, request.made))
        self.version = body["new_version"]
        return {"success": True}

    async def on_release_memory_occupation(self, body: Any) -> Any:
        return None

    async def on_resume_memory_occupation(self, body: Any) -> Any:
        return None

    async def on_get_weights_by_name(self, body: Any) -> Any:
        return self.weights.get(body["name"])


def _refused(message: str) -> web.Response:
    return web.json_response({"success": False, "message": message}, status=400)


@asynccontextmanager
async def stand_in(kind: Callable[..., Any] = StandIn, **options: Any) -> AsyncIterator[Any]:
    """A server of this event loop, on a free port of loopback."""
    server = kind(**options)
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()


async def _serve(host: str, port: int, version: str) -> None:
    server = StandIn()
    server.version = version
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    print(f"serving as process {os.getpid()}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "0"))
