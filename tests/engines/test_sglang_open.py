"""Servers started and attached to: processes of the stand-in in the place of SGLang's."""

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
from engines.sglang_server import stand_in
from tiny import tiny_model, tiny_tokenizer

from paceline.engines.base import Request, Sampling, SGLangEngineConfig
from paceline.engines.router import RoutedEngine
from paceline.engines.server import HOST, PORT, LocalLauncher, LocalServer, ServerCommand
from paceline.engines.sglang_open import open_sglang
from paceline.errors import ConfigError, EngineError, WeightError
from paceline.models import ModelConfig

SERVER = str(Path(__file__).with_name("sglang_server.py"))


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
        version = command.argv[command.argv.index("--weight-version") + 1]
        argv = (sys.executable, SERVER, HOST, PORT, version)
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
        engine = await open_sglang(
            SGLangEngineConfig(**(settings | changes)),
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
        assert [c.name for c in launcher.commands] == ["policy-sglang-0", "policy-sglang-1"]
        for server in launcher.servers:
            assert await server.ended() is not None

    asyncio.run(main())


def test_a_killed_server_is_replaced_and_no_request_is_lost(
    tmp_path: Path, model: ModelConfig
) -> None:
    async def main() -> None:
        launcher = StandInLauncher(tmp_path)
        async with opened(model, tmp_path, launcher, replicas=2) as engine:
            os.kill(await launcher.pid(0), signal.SIGKILL)
            answers = await asyncio.gather(*(engine.generate(request()) for _ in range(40)))
            assert all(len(made.tokens) == 4 for made in answers)
            await until(lambda: len(launcher.commands) == 3 and engine.num_serving == 2)
            assert launcher.commands[2].name == launcher.commands[0].name
            # After a publish the folder's weights are old.
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
        launcher = StandInLauncher(tmp_path, {1: "raise MemoryError('no room for the weights')"})
        with pytest.raises(EngineError, match="MemoryError: no room for the weights") as caught:
            async with opened(model, tmp_path, launcher, replicas=2):
                pass
        assert "SGLang server 1 of policy 'policy' ended with 1" in str(caught.value)
        assert "policy-sglang-1.log" in str(caught.value)
        for server in launcher.servers:
            assert await server.ended() is not None

    asyncio.run(main())


def test_a_port_that_was_taken_meanwhile(tmp_path: Path, model: ModelConfig) -> None:
    async def main() -> None:
        taken = "raise OSError('[Errno 98] address already in use')"
        launcher = StandInLauncher(tmp_path, {0: taken})
        async with opened(model, tmp_path, launcher) as engine:
            assert engine.num_serving == 1
        assert len(launcher.commands) == 2
        launcher = StandInLauncher(tmp_path, dict.fromkeys(range(3), taken))
        with pytest.raises(EngineError, match="address already in use"):
            async with opened(model, tmp_path, launcher):
                pass

    asyncio.run(main())


def test_a_server_that_is_open_to_the_network_has_a_key(
    tmp_path: Path, model: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    async def key(host: str) -> str | None:
        launcher = StandInLauncher(tmp_path)
        async with opened(model, tmp_path, launcher, host=host) as engine:
            await engine.generate(request())
        argv = launcher.commands[0].argv
        return argv[argv.index("--api-key") + 1] if "--api-key" in argv else None

    with caplog.at_level("DEBUG"):
        assert asyncio.run(key("127.0.0.1")) is None
        keys = [asyncio.run(key("0.0.0.0")) for _ in range(2)]
    assert None not in keys
    assert keys[0] != keys[1]
    assert not any(str(found) in caplog.text for found in keys)


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
            assert "/flush_cache" in first.paths

    asyncio.run(main())


def test_nobody_answers_at_a_given_url(tmp_path: Path, model: ModelConfig) -> None:
    async def main() -> None:
        with pytest.raises(EngineError, match=r"was not ready within 0\.5 s") as caught:
            async with opened(model, tmp_path, urls=("http://127.0.0.1:9",), start_timeout_s=0.5):
                pass
        assert "can not be reached" in str(caught.value)
        assert "correct engine.urls" in str(caught.value)
        assert "output" not in str(caught.value)

    asyncio.run(main())


def test_a_server_of_another_kind_at_a_given_url(tmp_path: Path, model: ModelConfig) -> None:
    async def main() -> None:
        site = await asyncio.start_server(_web_page, "127.0.0.1", 0)
        async with site:
            url = f"http://127.0.0.1:{site.sockets[0].getsockname()[1]}"
            with pytest.raises(EngineError, match="does not speak SGLang's native HTTP API"):
                async with opened(model, tmp_path, urls=(url,)):
                    pass

    asyncio.run(main())


async def _web_page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.0 404 Not Found\r\n\r\n<html><head></head><h1>No</h1></html>")
    writer.close()


def test_the_only_server_is_killed_after_a_publish(tmp_path: Path, model: ModelConfig) -> None:
    async def main() -> None:
        launcher = StandInLauncher(tmp_path)
        async with opened(model, tmp_path, launcher) as engine:
            await engine.receive(plan(4, "disk"))
            os.kill(await launcher.pid(0), signal.SIGKILL)
            with pytest.raises(
                EngineError, match=r"server 0 of.*: was ended by signal 9"
            ) as caught:
                await engine.generate(request())
            assert "policy-sglang-0.log" in str(caught.value)
            assert str(caught.value.__cause__) == str(caught.value)  # which the user sees

    asyncio.run(main())


def test_the_only_server_is_killed_before_a_publish(tmp_path: Path, model: ModelConfig) -> None:
    async def main() -> None:
        launcher = StandInLauncher(tmp_path)
        async with opened(model, tmp_path, launcher) as engine:
            os.kill(await launcher.pid(0), signal.SIGKILL)
            with pytest.raises(WeightError, match="was ended by signal 9"):
                await engine.receive(plan(4, "disk"))

    asyncio.run(main())


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match=r"model\.path = '/nowhere' can not be served"):
            async with opened(ModelConfig(path="/nowhere"), tmp_path):
                pass

    asyncio.run(main())
