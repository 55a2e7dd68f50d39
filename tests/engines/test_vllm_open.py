"""Servers started and attached to: processes of the stand-in in the place of vLLM's."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from engines.replicas import plan
from engines.vllm_stand_in import stand_in
from tiny import tiny_model, tiny_tokenizer

from paceline.engines.base import Request, Sampling, VLLMEngineConfig
from paceline.engines.router import RoutedEngine
from paceline.engines.server import HOST, PORT, LocalLauncher, LocalServer, ServerCommand
from paceline.engines.vllm_open import open_vllm
from paceline.errors import EngineError, WeightError
from paceline.models import ModelConfig

SERVER = str(Path(__file__).with_name("vllm_stand_in.py"))


class StandInLauncher:
    """Starts stand-ins, or what `instead` says for a start."""

    def __init__(self, folder: Path, instead: dict[int, str] | None = None) -> None:
        self._local = LocalLauncher(folder)
        self._instead = instead or {}
        self.commands: list[ServerCommand] = []
        self.servers: list[LocalServer] = []

    async def start(self, command: ServerCommand) -> LocalServer:
        number = len(self.commands)
        self.commands.append(command)
        argv = (sys.executable, SERVER, HOST, PORT)
        if number in self._instead:
            argv = (sys.executable, "-c", self._instead[number])
        server = await self._local.start(dataclasses.replace(command, argv=argv))
        self.servers.append(server)
        return server

    async def pid(self, number: int) -> int:
        """Of the server that was started as the so manieth."""
        output = await self.servers[number].last_output()
        found = re.search(r"serving as process (\d+)", output)
        assert found is not None
        return int(found[1])


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    tiny_model().config.save_pretrained(tmp_path / "model")
    return ModelConfig(path=str(tmp_path / "model"))


@asynccontextmanager
async def opened(
    model: ModelConfig, folder: Path, launcher: StandInLauncher | None = None, **changes: Any
) -> AsyncIterator[RoutedEngine]:
    settings: dict[str, Any] = {"device": "cpu", "start_timeout_s": 30.0}
    async with asyncio.timeout(60):
        engine = await open_vllm(
            VLLMEngineConfig(**(settings | changes)),
            model,
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


def request() -> Request:
    return Request([5, 6], Sampling(max_tokens=4), seed=0)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_servers_are_started_and_ended(tmp_path: Path, model: ModelConfig) -> None:
    async def main() -> None:
        launcher = StandInLauncher(tmp_path)
        async with opened(model, tmp_path, launcher, replicas=2) as engine:
            assert engine.num_serving == 2
            made = await engine.generate(request())
            assert (made.tokens, made.versions) == ([10, 11, 12, 13], [3] * 4)
        assert [c.name for c in launcher.commands] == ["policy-vllm-0", "policy-vllm-1"]
        for server in launcher.servers:
            assert await server.ended() is not None

    asyncio.run(main())


def test_a_killed_server_comes_back_with_the_weights_of_the_folder(
    tmp_path: Path, model: ModelConfig
) -> None:
    async def main() -> None:
        launcher = StandInLauncher(tmp_path)
        async with opened(model, tmp_path, launcher, replicas=2) as engine:
            os.kill(await launcher.pid(0), signal.SIGKILL)
            answers = await asyncio.gather(*(engine.generate(request()) for _ in range(40)))
            assert all(len(made.tokens) == 4 for made in answers)
            await until(lambda: len(launcher.commands) == 3 and engine.num_serving == 2)
            await engine.receive(plan(4))
            os.kill(await launcher.pid(2), signal.SIGKILL)
            await until(lambda: len(launcher.commands) == 4 and len(engine._fleet.up()) == 2)
            assert engine.num_serving == 1
            assert (await engine.generate(request())).versions == [4] * 4
            await engine.receive(plan(5))
            assert engine.num_serving == 2

    asyncio.run(main())


def test_a_server_that_does_not_start_tells_why(tmp_path: Path, model: ModelConfig) -> None:
    async def main() -> None:
        words = "Unsupported CPU attention configuration"
        launcher = StandInLauncher(tmp_path, {0: f"raise RuntimeError('{words}')"})
        with pytest.raises(EngineError, match=f"RuntimeError: {words}") as caught:
            async with opened(model, tmp_path, launcher):
                pass
        assert "vLLM server 0 of policy 'policy' ended with 1" in str(caught.value)
        assert "policy-vllm-0.log" in str(caught.value)

    asyncio.run(main())


def test_a_server_that_is_open_to_the_network_has_a_key(tmp_path: Path, model: ModelConfig) -> None:
    async def key(host: str) -> str | None:
        launcher = StandInLauncher(tmp_path)
        async with opened(model, tmp_path, launcher, host=host) as engine:
            await engine.generate(request())
        return launcher.commands[0].env.get("PACELINE_SERVER_KEY")

    assert asyncio.run(key("127.0.0.1")) is None
    keys = [asyncio.run(key("0.0.0.0")) for _ in range(2)]
    assert None not in keys
    assert keys[0] != keys[1]


def test_servers_of_others_are_attached_to(tmp_path: Path, model: ModelConfig) -> None:
    async def main() -> None:
        async with stand_in() as first, stand_in() as second:
            urls = (first.url + "/", second.url)
            async with opened(model, tmp_path, urls=urls) as engine:
                assert first.version == second.version == "3"
                await engine.generate(request())
                await engine.pause("finish")
                with pytest.raises(WeightError, match="which go to servers only that were started"):
                    await engine.receive(plan(4, "handles"))
                await engine.receive(plan(4, "disk"))
                await engine.resume()
                assert first.version == "4"

    asyncio.run(main())


def test_a_server_of_somebody_else_that_lacks_the_extension(
    tmp_path: Path, model: ModelConfig
) -> None:
    async def main() -> None:
        async with stand_in() as server:
            server.config["parallel_config"]["worker_extension_cls"] = ""
            with pytest.raises(EngineError, match="--worker-extension-cls paceline_vllm"):
                async with opened(model, tmp_path, urls=(server.url,)):
                    pass

    asyncio.run(main())
