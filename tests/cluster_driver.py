"""A driver with two policies' workers and a server, for tests that end it: RUNTIME FOLDER CALL.

Writes the process ids of all that it has started to FOLDER/started, and then waits: in a call of
its workers if CALL is "hang".
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from cluster_workers import Probe

from paceline.cluster.base import Cluster, WorkerSpec
from paceline.cluster.open import open_cluster
from paceline.cluster.placement import Need
from paceline.cluster.settings import ClusterConfig
from paceline.engines.server import HOST, PORT, ServerCommand

SERVER = (sys.executable, "-m", "http.server", "--bind", HOST, PORT)


async def run(cluster: Cluster, folder: Path, call: str, open_groups: list[Any]) -> None:
    names = ("solver", "verifier")
    for name in names:
        spec = WorkerSpec(f"trainer of {name}", Probe, {"folder": str(folder)}, size=2)
        open_groups.append(await cluster.start(spec, cluster.devices(name)))
    pids = [os.getpid()]
    for group in open_groups:
        pids += [pid for _, pid in await group.call("whoami")]
        pids += await group.call("start_child")
    launcher = cluster.launcher(cluster.devices("engine"))
    server = await launcher.start(ServerCommand("engine", SERVER))
    (folder / "new").write_text(json.dumps({"pids": pids, "url": server.url}))
    (folder / "new").rename(folder / "started")
    if call == "hang":
        await open_groups[0].call("hang", 0)
    await asyncio.Event().wait()


async def main(runtime: Any, folder: Path, call: str) -> None:
    needs = [Need(name, 2, on_gpu=False) for name in ("solver", "verifier", "engine")]
    config = ClusterConfig(runtime=runtime)
    cluster = await open_cluster(config, needs, folder / "logs")
    groups: list[Any] = []
    try:
        await run(cluster, folder, call, groups)
    finally:
        for group in groups:
            await group.aclose()
        await cluster.aclose()


if __name__ == "__main__":
    # A shell that runs the tests in the background lets its children ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
