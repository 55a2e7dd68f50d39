"""Requests that are given up while SGLang's router is started or given its replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engines.sglang_server import StandIn
from engines.test_sglang_open import until
from engines.test_sglang_router import Behind, ask, behind, request

from paceline.engines.base import Completion
from paceline.engines.sglang_router import SGLangRouter


class Held:
    """Lets a call in when it is told to, and knows how many are before it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.waiting, self.open = 0, asyncio.Event()
        real = getattr(owner, name)

        async def held(*given: Any) -> Any:
            self.waiting += 1
            await self.open.wait()
            return await real(*given)

        monkeypatch.setattr(owner, name, held)


async def give_up(task: asyncio.Task[Any]) -> None:
    for _ in range(20):  # it has got as far as it gets
        await asyncio.sleep(0)
    task.cancel()
    assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], BaseException)


async def held_start(
    b: Behind, monkeypatch: pytest.MonkeyPatch
) -> tuple[Held, asyncio.Task[Completion]]:
    """The router is gone, and a request waits for a new one, whose start is held."""
    b.launcher.kill_router()
    held = Held(monkeypatch, b.launcher, "start")
    task = asyncio.create_task(b.engine.generate(request()))
    async with asyncio.timeout(20):
        await until(lambda: held.waiting == 1)
    return held, task


def let_all_go(servers: list[StandIn]) -> None:
    for server in servers:
        server.manual = False
        server.advance(4)


def test_while_it_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(b: Behind) -> None:
        held, first = await held_start(b, monkeypatch)
        await give_up(first)
        for seed in range(1, 5):
            await give_up(asyncio.create_task(b.engine.generate(request(4, seed))))
        last = asyncio.create_task(b.engine.generate(request(4, 9)))
        held.open.set()
        await b.running(1)
        let_all_go(b.servers)
        assert len((await last).tokens) == 4
        assert held.waiting == 1

    behind(tmp_path, "stand-in", scenario)


def test_while_it_is_given_its_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(b: Behind) -> None:
        gone, other = b.servers
        for path in ("/generate", "/model_info", "/health"):
            gone.faults[path] = "drop"
        tasks = ask(b.engine, 6)
        await until(lambda: len(other.running) == 6)
        held = Held(monkeypatch, b.engine._front, "_bring_behind")
        gone.faults.clear()
        await until(lambda: b.engine.num_serving == 2 and not gone.running)
        late = asyncio.create_task(b.engine.generate(request(4, 8)))
        await until(lambda: held.waiting == 1)
        await give_up(late)
        held.open.set()
        asked = len(other.bodies("/generate"))
        let_all_go(b.servers)
        assert [len((await task).tokens) for task in tasks] == [4] * 6
        assert (len(b.launcher.routers), len(other.bodies("/generate"))) == (1, asked)
        assert len((await b.engine.generate(request())).tokens) == 4

    behind(tmp_path, "stand-in", scenario)


def test_it_is_closed_while_it_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(b: Behind) -> None:
        _, task = await held_start(b, monkeypatch)
        front: Any = b.engine._front
        assert isinstance(front, SGLangRouter)
        await b.engine.aclose()
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], BaseException)
        assert front._settling is not None
        assert front._settling.done()

    behind(tmp_path, "stand-in", scenario)
