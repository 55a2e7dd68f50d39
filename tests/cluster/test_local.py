"""What child processes of this machine do beyond what every worker group does."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_groups import LocalStarter, until
from cluster_workers import Probe, open_files, refuse
from reward_workers import has_ended

from paceline.cluster.base import WorkerSpec
from paceline.cluster.local import LocalGroup
from paceline.cluster.open import open_cluster
from paceline.cluster.placement import Need
from paceline.cluster.settings import ClusterConfig
from paceline.engines.server import ServerCommand
from paceline.errors import ConfigError, WorkerError

WORKERS = WorkerSpec("trainer of p", Probe, size=2)


def with_group(local: LocalStarter, body: Callable[[Any], Awaitable[None]]) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            await body(await local.start(stack, WORKERS))

    asyncio.run(run())


def test_output_of_workers_is_in_their_logs_and_disturbs_nothing(local: LocalStarter) -> None:
    async def body(group: Any) -> None:
        assert await group.call("write_everywhere") == ["", ""]
        assert await group.call("scaled", 2) == [2, 2]

    with_group(local, body)
    for rank in range(2):
        log = (local.folder / f"trainer-of-p-{rank}.log").read_text()
        for words in (f"rank {rank} is here", "printed", "written", "raw"):
            assert words in log


def test_errors_tell_the_output_of_this_start_alone(local: LocalStarter) -> None:
    with_group(local, lambda group: group.call("write_everywhere"))

    async def body(group: Any) -> None:
        with pytest.raises(WorkerError) as caught:
            await group.call("die", 0)
        assert "about to go" in str(caught.value)
        assert "printed" not in str(caught.value)

    with_group(local, body)


def test_no_memory_stays_behind(local: LocalStarter) -> None:
    """The driver lets go after each call, and a worker with its next one."""

    async def body(group: Any) -> None:
        values = np.ones(2**21, np.uint8)
        for _ in range(20):
            await group.call("echo", values)
        with pytest.raises(WorkerError):
            await group.call("nothing", values)
        assert not [name for name in open_files() if "memfd" in name]
        for files in await group.call("open_files"):
            assert not [name for name in files if "memfd" in name]
        call = asyncio.ensure_future(group.call("hang", 0, values))
        await until(lambda: group.is_busy)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not [name for name in open_files() if "memfd" in name]

    before = len(open_files())
    with_group(local, body)
    assert len(open_files()) == before


def test_a_start_that_fails_leaves_no_open_files(local: LocalStarter) -> None:
    async def run() -> None:
        before = len(open_files())
        with pytest.raises(ConfigError):
            await LocalGroup.start(WorkerSpec("a", refuse), local.folder)
        assert len(open_files()) == before

    asyncio.run(run())


def test_what_a_worker_has_started_ends_with_it(local: LocalStarter) -> None:
    pids: list[int] = []

    async def close(group: Any) -> None:
        pids.extend(await group.call("start_child"))

    async def die(group: Any) -> None:
        pids.extend(await group.call("start_child"))
        with pytest.raises(WorkerError):
            await group.call("die", 0)
        assert has_ended(pids[0])

    for body in (close, die):
        pids.clear()
        with_group(local, body)
        assert len(pids) == 2
        assert all(has_ended(pid) for pid in pids)


def test_each_rank_sees_its_gpu_alone(local: LocalStarter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-abc")

    async def run() -> None:
        group = await LocalGroup.start(WORKERS, local.folder, gpus=[1, 0])
        try:
            assert await group.call("environment", "CUDA_VISIBLE_DEVICES") == [["GPU-abc"], ["3"]]
            assert {rank.device for rank, _ in await group.call("whoami")} == {"cuda:0"}
        finally:
            await group.aclose()

    asyncio.run(run())


def test_opening_a_cluster_of_this_machine(tmp_path: Path) -> None:
    async def run() -> None:
        needs = [Need("trainer", 2, on_gpu=False), Need("engine", 1, on_gpu=False)]
        config = ClusterConfig(env={"OF_ALL": "given"})
        cluster = await open_cluster(config, needs, tmp_path)
        group = await cluster.start(WORKERS, cluster.devices("trainer"))
        assert await group.call("environment", "OF_ALL") == [["given"]] * 2
        server = await cluster.launcher(cluster.devices("engine")).start(
            ServerCommand("engine", (sys.executable, "-c", "print('served')"))
        )
        await until(lambda: "served" in (tmp_path / "engine.log").read_text())
        assert "served" in await server.last_output()
        await server.aclose()
        await group.aclose()
        await cluster.aclose()
        await cluster.aclose()

    asyncio.run(run())


def test_gpus_that_are_not_there_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    needs = [Need("trainer of p", 16), Need("engine of p", 16, share="p")]
    with pytest.raises(ConfigError, match="GPUs requested 32, available 8"):
        asyncio.run(open_cluster(ClusterConfig(), needs, tmp_path / "logs"))
    assert not (tmp_path / "logs").exists()


def test_a_function_of_a_script_goes_by_its_code(local: LocalStarter) -> None:
    class Own:
        def __init__(self, rank: Any, base: int) -> None:
            self.base = base

        def value(self) -> tuple[int, int]:
            return self.base, os.getpid()

    async def run() -> None:
        group = await LocalGroup.start(WorkerSpec("own", Own, {"base": 5}), local.folder)
        try:
            ((base, pid),) = await group.call("value")
        finally:
            await group.aclose()
        assert base == 5
        assert pid != os.getpid()

    asyncio.run(run())
