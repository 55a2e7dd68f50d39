"""A stand-in for SGLang's own router: its HTTP API as far as the engine uses it.

Requests go round its workers. `python sglang_router_stand_in.py HOST PORT` is a process that can be
killed; what it is given to forward it forwards, and a worker that is lost is status 500.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys

import aiohttp
from aiohttp import web


class Router:
    def __init__(self) -> None:
        self.workers: dict[str, str] = {}
        """Id -> url."""
        self.numbers = itertools.count()

    async def handle(self, http: web.Request) -> web.Response:
        match (http.method, http.path.strip("/").split("/")):
            case "GET", ["liveness"]:
                return web.Response(text="OK")
            case "GET", ["workers"]:
                listed = [{"id": i, "url": u, "is_healthy": True} for i, u in self.workers.items()]
                return web.json_response({"workers": listed})
            case "POST", ["workers"]:
                self.workers[f"id-{next(self.numbers)}"] = (await http.json())["url"]
                return web.json_response({"status": "accepted"}, status=202)
            case "DELETE", ["workers", number]:
                del self.workers[number]
                return web.json_response({"status": "accepted"}, status=202)
            case "POST", ["generate"]:
                return await self.forward(await http.read())
        return web.Response(status=404)

    async def forward(self, body: bytes) -> web.Response:
        if not self.workers:
            return web.json_response({"error": {"message": "No available workers"}}, status=503)
        url = list(self.workers.values())[next(self.numbers) % len(self.workers)]
        try:
            headers = {"Content-Type": "application/json"}
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{url}/generate", data=body, headers=headers) as answer,
            ):
                content = await answer.read()
                return web.Response(body=content, status=answer.status)
        except aiohttp.ClientError as error:
            return web.json_response({"error": {"message": str(error)}}, status=500)


async def _serve(host: str, port: int) -> None:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", Router().handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    print(f"routing as process {os.getpid()}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2])))
