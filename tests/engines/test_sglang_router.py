"""SGLang's own router before stand-ins for servers: itself, where it is installed, and a stand-in.

Servers that the tests look into are attached to; servers that are killed are started.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from engines.replicas import plan
from engines.sglang_real import sglang_python
from engines.sglang_server import StandIn, stand_in
from engines.test_sglang_open import StandInLauncher, until
from tiny import tiny_model, tiny_tokenizer

from paceline.engines.base import (
    Completion,
    CutSignal,
    Request,
    Sampling,
    SGLangEngineConfig,
)
from paceline.engines.http import JsonClient
from paceline.engines.router import RoutedEngine
from paceline.engines.server import HOST, PORT, LocalServer, ServerCommand
from paceline.engines.sglang_open import open_sglang
from paceline.errors import EngineError
from paceline.models import ModelConfig

ROUTER = str(Path(__file__).with_name("sglang_router_stand_in.py"))
REAL = pytest.param("real", marks=[pytest.mark.slow, pytest.mark.timeout(120)])


class Routers(StandInLauncher):
    """Starts routers, real ones or stand-ins, and stand-ins for servers."""

    def __init__(self, folder: Path, kind: str) -> None:
        super().__init__(folder)
        self.kind, self.instead_of_router = kind, ""
        self.routers: list[LocalServer] = []
        self.router_commands: list[ServerCommand] = []

    async def start(self, command: ServerCommand) -> LocalServer:
        if not command.name.endswith("-router"):
            return await super().start(command)
        self.router_commands.append(command)
        argv = command.argv
        if self.instead_of_router:
            argv = (sys.executable, "-c", self.instead_of_router)
        elif self.kind == "stand-in":
            argv = (sys.executable, ROUTER, HOST, PORT)
        router = await self._local.start(dataclasses.replace(command, argv=argv))
        self.routers.append(router)
        return router

    def kill_router(self) -> None:
        keeper = self.routers[-1].pid
        (child,) = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)


@dataclasses.dataclass
class Behind:
    """A router with two servers behind it."""

    engine: RoutedEngine
    servers: list[StandIn]
    launcher: Routers
    client: JsonClient

    async def listed(self) -> set[str]:
        """Urls of the servers that the router hands requests to."""
        found = await self.client.request(self.launcher.routers[-1].url, "/workers", timeout_s=5)
        return {worker["url"] for worker in found["workers"]}

    async def running(self, count: int) -> None:
        async with asyncio.timeout(20):
            await until(lambda: sum(len(s.running) for s in self.servers) == count)

    def asked(self) -> list[int]:
        return [len(server.bodies("/generate")) for server in self.servers]


Scenario = Callable[[Behind], Awaitable[None]]


@pytest.fixture(params=["stand-in", REAL])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "real":
        sglang_python()
    return str(request.param)


def model_in(folder: Path) -> ModelConfig:
    if not (folder / "model").exists():
        tiny_model().config.save_pretrained(folder / "model")
    return ModelConfig(path=str(folder / "model"))


@asynccontextmanager
async def opened(folder: Path, launcher: Routers, **changes: Any) -> AsyncIterator[RoutedEngine]:
    settings: dict[str, Any] = {
        "device": "cpu",
        "start_timeout_s": 60.0,
        "router": "sglang",
        "router_arguments": ("--policy", "round_robin"),
        "request_timeout_s": 30.0,
    }
    if launcher.kind == "real":
        settings["python"] = sglang_python()
    engine = await open_sglang(
        SGLangEngineConfig(**(settings | changes)),
        model_in(folder),
        tiny_tokenizer(),
        policy="policy",
        version=3,
        launch=launcher,
        folder=folder,
    )
    try:
        yield engine
    finally:
        await engine.aclose()


def behind(folder: Path, kind: str, scenario: Scenario, count: int = 2, **changes: Any) -> None:
    """The scenario over servers that are attached to, whose tokens come when it says so."""

    async def main() -> None:
        launcher, client = Routers(folder, kind), JsonClient()
        async with asyncio.timeout(90), AsyncExitStack() as stack:
            servers = [await stack.enter_async_context(stand_in(manual=True)) for _ in range(count)]
            stack.push_async_callback(client.aclose)
            urls = tuple(server.url for server in servers)
            engine = await stack.enter_async_context(opened(folder, launcher, urls=urls, **changes))
            await scenario(Behind(engine, servers, launcher, client))
        for router in launcher.routers:
            assert await router.ended() is not None

    asyncio.run(main())


def request(count: int = 4, seed: int = 0, **changes: Any) -> Request:
    return Request([5, 6, 7 + seed], Sampling(max_tokens=count), seed=seed, **changes)


def ask(engine: RoutedEngine, count: int, tokens: int = 4) -> list[asyncio.Task[Completion]]:
    return [asyncio.create_task(engine.generate(request(tokens, i))) for i in range(count)]


def test_answers_come_from_all_replicas_and_are_whole(tmp_path: Path, kind: str) -> None:
    async def scenario(b: Behind) -> None:
        for server in b.servers:
            server.manual = False
        sampling = Sampling(
            temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2,
            max_tokens=9, stop=("ba",), stop_token_ids=(4,),
        )  # fmt: skip
        asked = [Request([5, 6, i], sampling, seed=2**40 + i) for i in range(8)]
        for made in await asyncio.gather(*map(b.engine.generate, asked)):
            assert made.tokens == list(range(10, 19))
            assert made.logprobs == [-0.5] * 9
            assert made.versions == [3] * 9
            assert made.finish == "length"
        assert b.asked() == [4, 4]
        bodies = [body for server in b.servers for body in server.bodies("/generate")]
        assert sorted(body["input_ids"] for body in bodies) == [[5, 6, i] for i in range(8)]
        assert len({body["rid"] for body in bodies}) == 8
        for body in bodies:
            assert body["return_logprob"] is True
            assert body["sampling_params"] == {
                "max_new_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
                "repetition_penalty": 1.2, "stop": ["ba"], "stop_token_ids": [1, 4],
                "skip_special_tokens": False, "sampling_seed": 2**40 + body["input_ids"][2],
            }  # fmt: skip

    behind(tmp_path, kind, scenario)


def test_one_replica_will_do(tmp_path: Path) -> None:
    async def scenario(b: Behind) -> None:
        tasks = ask(b.engine, 3)
        await b.running(3)
        b.servers[0].advance(4)
        assert [len((await task).tokens) for task in tasks] == [4] * 3

    behind(tmp_path, "stand-in", scenario, count=1)


def test_a_cut_and_a_cancellation_reach_the_server_that_has_it(tmp_path: Path, kind: str) -> None:
    async def scenario(b: Behind) -> None:
        cut = CutSignal()
        first = asyncio.create_task(b.engine.generate(request(cut=cut)))
        second, third = ask(b.engine, 2)
        await b.running(3)
        for server in b.servers:
            server.advance(2)
        cut.set()
        made = await first
        assert (made.tokens, made.finish, made.can_go_on) == ([10, 11], "length", False)
        second.cancel()
        await b.running(1)
        assert b.engine.num_running == 1
        for server in b.servers:
            server.advance(2)
        assert (await third).finish == "length"

    behind(tmp_path, kind, scenario)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("stand-in", "keep"),
        ("stand-in", "recompute"),
        pytest.param("real", "keep", marks=REAL.marks),
    ],
    indirect=["kind"],
)
def test_pauses_freeze_what_runs_and_hold_what_comes(tmp_path: Path, kind: str, mode: Any) -> None:
    async def scenario(b: Behind) -> None:
        running = ask(b.engine, 4)
        await b.running(4)
        for server in b.servers:
            server.advance(1)
        await b.engine.pause(mode)
        assert {s.paused for s in b.servers} == {"in_place" if mode == "keep" else "retract"}
        later = ask(b.engine, 2)
        await b.engine.receive(plan(4, "disk"))
        assert sum(b.asked()) == 4
        await b.engine.resume()
        await b.running(6)
        for server in b.servers:
            server.advance(4)
        for task in running:
            assert (await task).versions == [3, 4, 4, 4]
        for task in later:
            assert (await task).versions == [4] * 4

    behind(tmp_path, kind, scenario)


def test_finish_waits_for_what_runs_and_abort_ends_it(tmp_path: Path, kind: str) -> None:
    async def scenario(b: Behind) -> None:
        running = ask(b.engine, 4)
        await b.running(4)
        pause = asyncio.create_task(b.engine.pause("finish"))
        later = ask(b.engine, 4)
        await asyncio.sleep(0)
        assert b.engine.num_running == 4
        for server in b.servers:
            server.advance(4)
        await asyncio.gather(pause, *running)
        assert sum(b.asked()) == 4
        await b.engine.resume()
        await b.running(4)
        for server in b.servers:
            server.advance(3)
        await b.engine.pause("abort")
        for task in later:
            made = await task
            assert (len(made.tokens), made.finish, made.can_go_on) == (3, "abort", True)
        assert {server.paused for server in b.servers} == {"retract"}

    behind(tmp_path, kind, scenario)


def test_scores_and_looks_go_to_the_replicas(tmp_path: Path) -> None:
    async def scenario(b: Behind) -> None:
        assert await b.engine.score([5, 6, 7]) == [0.0, -6.0, -7.0]
        assert sum(b.asked()) == 1
        assert all("/model_info" in server.paths for server in b.servers)

    behind(tmp_path, "stand-in", scenario)


def test_one_that_is_lost_is_taken_out_before_its_requests_are_asked_anew(
    tmp_path: Path, kind: str
) -> None:
    async def scenario(b: Behind) -> None:
        gone, other = b.servers
        assert await b.listed() == {gone.url, other.url}
        for path in ("/generate", "/model_info", "/health"):
            gone.faults[path] = "drop"
        tasks = ask(b.engine, 6)
        await until(lambda: len(other.running) == 6)
        assert (b.engine.num_serving, await b.listed()) == (1, {other.url})
        other.advance(4)
        for task in tasks:
            assert (await task).versions == [3] * 4
        assert len(other.bodies("/generate")) == 6
        # It comes back as it was, and is given requests again.
        gone.faults.clear()
        await until(lambda: b.engine.num_serving == 2 and not gone.running)
        before = len(gone.bodies("/generate"))
        tasks = ask(b.engine, 6)
        await b.running(6)
        assert await b.listed() == {gone.url, other.url}
        assert len(gone.bodies("/generate")) == before + 3
        for server in b.servers:
            server.advance(4)
        await asyncio.gather(*tasks)

    behind(tmp_path, kind, scenario)


def test_one_that_came_back_with_other_weights_gets_nothing(tmp_path: Path) -> None:
    async def scenario(b: Behind) -> None:
        anew, other = b.servers
        await b.engine.receive(plan(4, "disk"))
        # As one does whose owner has started it again in a moment.
        anew.version, anew.faults["/generate"] = "0", "drop"
        tasks = ask(b.engine, 4)
        await until(lambda: len(other.running) == 4)
        anew.faults.clear()
        assert (b.engine.num_serving, await b.listed()) == (1, {other.url})
        other.advance(4)
        for task in tasks:
            assert (await task).versions == [4] * 4
        await until(lambda: len(b.engine._fleet.up()) == 2 and not anew.running)
        await b.engine.pause("finish")
        await b.engine.receive(plan(5, "disk"))
        await b.engine.resume()
        tasks = ask(b.engine, 4)
        await b.running(4)
        assert len(anew.running) == 2
        for server in b.servers:
            server.advance(4)
        for task in tasks:
            assert (await task).versions == [5] * 4

    behind(tmp_path, "stand-in", scenario)


def test_a_router_that_is_killed_is_started_again(tmp_path: Path, kind: str) -> None:
    async def scenario(b: Behind) -> None:
        tasks = ask(b.engine, 4)
        await b.running(4)
        b.launcher.kill_router()
        await until(lambda: len(b.launcher.routers) == 2)
        # What was open is ended at the servers, and asked anew.
        async with asyncio.timeout(20):
            await until(lambda: sum(b.asked()) == 8)
        await b.running(4)
        assert b.engine.num_serving == 2
        for server in b.servers:
            server.advance(4)
        assert [len((await task).tokens) for task in tasks] == [4] * 4

    behind(tmp_path, kind, scenario)


def test_what_one_replica_fails_at_is_asked_of_the_router_again(tmp_path: Path) -> None:
    async def scenario(b: Behind) -> None:
        b.servers[0].faults["/generate"] = 500
        for server in b.servers:
            server.manual = False
        for _ in range(6):
            assert len((await b.engine.generate(request())).tokens) == 4
        assert b.engine.num_serving == 2
        b.servers[0].faults["/generate"] = 400
        with pytest.raises(EngineError, match="refused a request: as ordered"):
            await asyncio.gather(*ask(b.engine, 2))

    behind(tmp_path, "stand-in", scenario)


def test_a_router_that_does_not_stay_ends_the_engine(tmp_path: Path) -> None:
    async def scenario(b: Behind) -> None:
        b.launcher.instead_of_router = "raise MemoryError('no room')"
        b.launcher.kill_router()
        with pytest.raises(EngineError, match="MemoryError: no room") as caught:
            await b.engine.generate(request())
        assert caught.value.__cause__ is not None  # the engine serves nobody any more
        assert "SGLang router of policy 'policy' ended with 1" in str(caught.value)
        assert "policy-sglang-router.log" in str(caught.value)

    behind(tmp_path, "stand-in", scenario)


def test_a_router_that_is_not_installed(tmp_path: Path) -> None:
    async def main() -> None:
        launcher = Routers(tmp_path, "stand-in")
        launcher.instead_of_router = "import sglang_router"
        async with stand_in() as server:
            with pytest.raises(EngineError, match="Install the package sglang-router"):
                async with opened(tmp_path, launcher, urls=(server.url,)):
                    pass

    asyncio.run(main())


def test_a_killed_server_is_replaced_behind_the_router(tmp_path: Path, kind: str) -> None:
    async def main() -> None:
        launcher = Routers(tmp_path, kind)
        async with asyncio.timeout(90), opened(tmp_path, launcher, replicas=2) as engine:
            os.kill(await launcher.pid(0), signal.SIGKILL)
            answers = await asyncio.gather(*ask(engine, 40))
            assert all(made.versions == [3] * 4 for made in answers)
            await until(lambda: len(launcher.commands) == 3 and engine.num_serving == 2)
            await asyncio.gather(*ask(engine, 4))
            # After a publish the folder's weights are old.
            await engine.receive(plan(4))
            os.kill(await launcher.pid(2), signal.SIGKILL)
            await until(lambda: len(launcher.commands) == 4 and len(engine._fleet.up()) == 2)
            assert engine.num_serving == 1
            assert all(m.versions == [4] * 4 for m in await asyncio.gather(*ask(engine, 8)))
            await engine.receive(plan(5))
            assert engine.num_serving == 2
            assert all(m.versions == [5] * 4 for m in await asyncio.gather(*ask(engine, 8)))
        for server in [*launcher.servers, *launcher.routers]:
            assert await server.ended() is not None

    asyncio.run(main())


def test_a_router_that_is_open_to_the_network_has_the_servers_key(
    tmp_path: Path, kind: str
) -> None:
    async def main() -> None:
        launcher = Routers(tmp_path, kind)
        async with asyncio.timeout(90), opened(tmp_path, launcher, host="0.0.0.0") as engine:
            assert len((await engine.generate(request())).tokens) == 4
            argv = launcher.router_commands[0].argv
            key = argv[argv.index("--api-key") + 1]
            assert key in launcher.commands[0].argv
            if kind == "real":
                stranger = JsonClient()
                with pytest.raises(EngineError, match="status 401"):
                    await stranger.request(launcher.routers[0].url, "/workers", timeout_s=5)
                await stranger.aclose()

    asyncio.run(main())
