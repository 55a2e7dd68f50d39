"""A real Ray cluster on this machine. Its GPUs exist in Ray's books only."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_groups import LIMITS, LOGICAL_GPUS, RayStarter, until
from cluster_workers import Probe
from reward_workers import has_ended

from paceline.cluster import ray as ray_part
from paceline.cluster import ray_servers
from paceline.cluster.base import WorkerSpec
from paceline.cluster.open import open_cluster
from paceline.cluster.placement import Need
from paceline.cluster.ray import RayCluster
from paceline.cluster.settings import ClusterConfig
from paceline.engines.server import HOST, PORT, ServerCommand
from paceline.errors import ConfigError, EngineError, MissingExtraError, WorkerError

RAY = ClusterConfig(runtime="ray")
TESTS = Path(__file__).parent.parent
slow = pytest.mark.slow


def with_cluster(
    needs: list[Need], folder: Path, body: Callable[[RayCluster], Awaitable[None]]
) -> None:
    async def run() -> None:
        cluster = await RayCluster.open(RAY, needs, folder, LIMITS)
        try:
            await body(cluster)
        finally:
            await cluster.aclose()

    asyncio.run(run())


@slow
def test_more_gpus_than_there_are_is_an_error_at_once(
    ray_cluster: RayStarter, tmp_path: Path
) -> None:
    start = time.monotonic()
    needs = [Need("trainer of p", 8), Need("engine of p", 8)]
    with pytest.raises(ConfigError, match="GPUs requested 16, available 8"):
        with_cluster(needs, tmp_path, _nothing)
    assert time.monotonic() - start < 5


@slow
def test_gpus_that_another_job_has_are_told_in_seconds_and_nothing_is_pending(
    ray_cluster: RayStarter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_part, "RESERVE_TIMEOUT_S", 1.0)

    async def body(cluster: RayCluster) -> None:
        with pytest.raises(ConfigError, match="GPUs requested 4, available now 2: other jobs"):
            await RayCluster.open(RAY, [Need("b", 4)], tmp_path, LIMITS)

    with_cluster([Need("a", 6)], tmp_path, body)

    ray = importlib.import_module("ray")
    asyncio.run(until(lambda: ray.available_resources().get("GPU") == LOGICAL_GPUS))


@slow
def test_two_policies_each_on_their_gpus_shared_by_trainer_and_engine(
    ray_cluster: RayStarter, tmp_path: Path
) -> None:
    needs = [
        Need(f"{part} of {policy}", 2, group=group, share=policy)
        for policy in ("solver", "verifier")
        for part, group in (("trainer", 1), ("engine", 2))
    ]

    async def body(cluster: RayCluster) -> None:
        seen: dict[str, set[str]] = {}
        for policy in ("solver", "verifier"):
            devices = cluster.devices(f"trainer of {policy}")
            group = await cluster.start(WorkerSpec(policy, Probe, size=2), devices)
            ranks = [rank for rank, _ in await group.call("whoami")]
            assert {rank.device for rank in ranks} == {"cuda:0"}
            (first,), (second,) = await group.call("environment", "CUDA_VISIBLE_DEVICES")
            seen[policy] = {first, second}
            launcher = cluster.launcher(cluster.devices(f"engine of {policy}"))
            server = await launcher.start(_server(tmp_path, num_devices=2))
            assert await _get(server.url) == f"{first},{second}"
            await server.aclose()
            await group.aclose()
        assert len(seen["solver"] | seen["verifier"]) == 4

    with_cluster(needs, tmp_path, body)


@slow
def test_the_object_store_is_free_again_after_calls_that_worked_failed_and_were_repeated(
    ray_cluster: RayStarter, tmp_path: Path
) -> None:
    async def body(cluster: RayCluster) -> None:
        group = await cluster.start(WorkerSpec("w", Probe), cluster.devices("w"))
        values = np.ones(2**26, np.uint8)
        for _ in range(3):
            (result,) = await group.call("echo", values)
            assert result.nbytes == values.nbytes
        with pytest.raises(WorkerError, match="has no method"):
            await group.call("nothing", values)
        with pytest.raises(WorkerError, match="ended unexpectedly"):
            await group.call("die", 0, "kill", values)
        await group.aclose()
        await ray_cluster.until_all_is_freed()

    with_cluster([Need("w", 1, on_gpu=False)], tmp_path, body)


@slow
def test_servers_start_on_the_node_and_end_when_asked(
    ray_cluster: RayStarter, tmp_path: Path
) -> None:
    async def body(cluster: RayCluster) -> None:
        launcher = cluster.launcher(cluster.devices("engine"))
        server = await launcher.start(_server(tmp_path))
        pid = int(await _get(f"{server.url}/pid"))
        assert await server.ended() is None
        await server.aclose()
        assert has_ended(pid)
        assert await server.ended() is not None
        broken = await launcher.start(
            ServerCommand("broken", (sys.executable, "-c", "print('bad luck'); exit(3)"))
        )
        await until(lambda: "bad luck" in (tmp_path / "broken.log").read_text())
        assert "bad luck" in await broken.last_output()
        with pytest.raises(EngineError, match="no devices"):
            await launcher.start(ServerCommand("x", ("true",), replica=1))

    with_cluster([Need("engine", 1, on_gpu=False)], tmp_path, body)


@slow
def test_a_server_on_another_node_must_not_listen_on_loopback(
    ray_cluster: RayStarter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(cluster: RayCluster) -> None:
        launcher = cluster.launcher(cluster.devices("engine"))
        open_server = await launcher.start(_server(tmp_path, host="0.0.0.0"))
        assert await _get(open_server.url) == ""
        assert "127.0.0.1" not in open_server.url
        await open_server.aclose()
        monkeypatch.setattr(ray_servers, "driver_address", lambda: "10.9.9.9")
        with pytest.raises(ConfigError, match=r"can not reach at 127.0.0.1: set engine.host"):
            await launcher.start(_server(tmp_path))

    with_cluster([Need("engine", 1, on_gpu=False)], tmp_path, body)


@slow
def test_a_cluster_that_the_caller_joined_is_left_as_it_is_and_signals_too(
    ray_cluster: RayStarter, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with_cluster([Need("w", 1, on_gpu=False)], tmp_path, _nothing)
    assert importlib.import_module("ray").is_initialized()
    assert signal.getsignal(signal.SIGTERM) is before
    assert before in (signal.SIG_DFL, signal.default_int_handler)


@slow
def test_several_nodes_each_rank_where_its_device_is(tmp_path: Path) -> None:
    """Two nodes in the books, of two GPUs each, on this machine."""
    script = TWO_NODES.format(folder=str(tmp_path))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
    nodes, gpus, addresses = json.loads(ended.stdout.splitlines()[-1])
    assert len(set(nodes)) == 2
    assert nodes == sorted(nodes, key=nodes.index)
    assert sorted(gpus) == ["0", "0", "1", "1"]
    assert len({tuple(address) for address in addresses}) == 1


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "nothing answers at 127.0.0.1:1"),
        ("ray://127.0.0.1:10001", "client protocol can not be used"),
    ],
)
def test_a_cluster_that_can_not_be_joined_is_told_at_once(
    address: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # by other tests of this process
    start = time.monotonic()
    config = ClusterConfig(runtime="ray", address=address)
    with pytest.raises(WorkerError, match=message):
        asyncio.run(open_cluster(config, [], tmp_path))
    assert time.monotonic() - start < 5


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'paceline\[ray\]'"):
        asyncio.run(open_cluster(RAY, [], tmp_path))


async def _nothing(cluster: RayCluster) -> None:
    assert cluster.devices


TWO_NODES = """
import asyncio, json, os
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from cluster_groups import LIMITS
from cluster_workers import NodeProbe
from paceline.cluster.base import WorkerSpec
from paceline.cluster.placement import Need
from paceline.cluster.ray import RayCluster
from paceline.cluster.settings import ClusterConfig

async def main(address):
    config = ClusterConfig(runtime="ray", address=address)
    cluster = await RayCluster.open(config, [Need("w", 4)], Path({folder!r}), LIMITS)
    group = await cluster.start(WorkerSpec("w", NodeProbe, size=4), cluster.devices("w"))
    told = await group.call("node")
    gpus = [visible for (visible,) in await group.call("environment", "CUDA_VISIBLE_DEVICES")]
    addresses = [(rank.address, rank.port) for rank, _ in await group.call("whoami")]
    await group.aclose()
    await cluster.aclose()
    print(json.dumps([told, gpus, addresses]))

nodes = Cluster(initialize_head=True, head_node_args={{"num_gpus": 2, "include_dashboard": False}})
nodes.add_node(num_gpus=2)
try:
    asyncio.run(main(nodes.address))
finally:
    nodes.shutdown()
"""

SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        text = os.environ.get("CUDA_VISIBLE_DEVICES", "") if self.path == "/" else str(os.getpid())
        self.wfile.write(text.encode())
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


def _server(folder: Path, **more: Any) -> ServerCommand:
    (folder / "server.py").write_text(SERVER)
    return ServerCommand("stub", (sys.executable, str(folder / "server.py"), HOST, PORT), **more)


async def _get(url: str) -> str:
    """What the server says, once it is there."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await asyncio.to_thread(_read, url)
            except OSError:
                await asyncio.sleep(0.1)


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as reply:
        text: str = reply.read().decode()
    return text
