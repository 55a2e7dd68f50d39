"""A real SGLang server: one for all tests, with a tiny Llama on the CPU."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.sglang_real import RealServer, Weights, real_engine, request
from tiny import tiny_tokenizer

from paceline.engines.base import Completion, CutSignal, Request, Sampling
from paceline.engines.router import RoutedEngine
from paceline.errors import EngineError, WeightError
from paceline.weights.base import Transport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("sglang")]

ENDLESS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    server = RealServer(tmp_path_factory.mktemp("sglang"))
    yield server
    server.close()


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[Weights]:
    weights = Weights(tmp_path)
    yield weights
    weights.close()


def assert_logprobs(weights: Weights, asked: Request, made: Completion) -> None:
    tokens = [*asked.tokens, *made.tokens]
    expected = weights.logprobs(tokens, asked.sampling.temperature)[len(asked.tokens) :]
    assert made.logprobs == pytest.approx(expected, abs=1e-4)


async def publish(
    engine: RoutedEngine, weights: Weights, version: int, transport: Transport, mode: Any = "finish"
) -> None:
    await engine.pause(mode)
    await engine.receive(weights.plan(version, transport))
    await engine.resume()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_log_probs_are_those_at_the_temperature(
    server: RealServer, temperature: float, tmp_path: Path
) -> None:
    weights = Weights(tmp_path)
    server.run(publish(server.engine, weights, 1, "handles"))
    asked = [request(seed=i, temperature=temperature) for i in range(8)]

    async def ask() -> list[Completion]:
        return await asyncio.gather(*map(server.engine.generate, asked))

    answers = server.run(ask())
    for question, made in zip(asked, answers, strict=True):
        assert_logprobs(weights, question, made)
        assert made.finish in ("stop", "length")
        if made.finish == "stop":
            assert made.tokens[-1] == made.stop == 1
    assert len({tuple(made.tokens) for made in answers}) > 1
    weights.close()


def test_scores_and_greedy_answers(server: RealServer, weights: Weights) -> None:
    server.run(publish(server.engine, weights, 1, "handles"))
    tokens = [5, 9, 12, 30, 31, 7]
    scores = server.run(server.engine.score(tokens))
    assert scores == pytest.approx(weights.logprobs(tokens), abs=1e-4)
    greedy = request(temperature=0.0, **ENDLESS)
    first, second = (server.run(server.engine.generate(greedy)) for _ in range(2))
    assert first.tokens == second.tokens
    whole = [*greedy.tokens, *first.tokens]
    assert first.logprobs == pytest.approx(weights.logprobs(whole)[3:], abs=1e-4)


def test_stop_texts_and_stop_tokens(server: RealServer) -> None:
    plain = server.run(server.engine.generate(request(20, temperature=0.0, **ENDLESS)))
    text = tiny_tokenizer().decode([t for t in plain.tokens if 3 <= t < 43])
    stop, token = text[2:4], plain.tokens[5]
    assert len(stop) == 2
    by_text = server.run(server.engine.generate(request(20, temperature=0.0, stop=(stop,))))
    by_token = server.run(
        server.engine.generate(request(20, temperature=0.0, stop_token_ids=(token,)))
    )
    assert by_token.tokens == plain.tokens[: plain.tokens.index(token) + 1]
    assert (by_token.finish, by_token.stop) == ("stop", token)
    if by_text.finish == "stop" and by_text.stop == stop:
        assert stop in tiny_tokenizer().decode(by_text.tokens)
        assert by_text.tokens == plain.tokens[: len(by_text.tokens)]
        assert len(by_text.logprobs) == len(by_text.tokens)


@pytest.mark.parametrize("transport", ["handles", "collective", "disk"])
def test_new_weights_serve_from_the_next_token_on(
    server: RealServer, transport: Transport, tmp_path: Path
) -> None:
    weights = Weights(tmp_path)
    for version, seed in enumerate((3, 4, 3), start=10):
        weights.become(seed)
        server.run(publish(server.engine, weights, version, transport))
        asked = request(seed=version, **ENDLESS)
        made = server.run(server.engine.generate(asked))
        assert made.versions == [version] * 12
        assert_logprobs(weights, asked, made)
    weights.close()


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_answers_that_go_on_with_new_weights(server: RealServer, mode: Any, tmp_path: Path) -> None:
    old, new = Weights(tmp_path / "old", 5), Weights(tmp_path / "new", 6)
    asked = [request(100, seed=i, **ENDLESS) for i in range(4)]

    async def scenario() -> list[Completion]:
        engine = server.engine
        await publish(engine, old, 20, "handles")
        tasks = [asyncio.create_task(engine.generate(question)) for question in asked]
        await asyncio.sleep(0.25)  # some tokens are made, and not all
        await publish(engine, new, 21, "handles", mode)
        return await asyncio.gather(*tasks)

    answers = server.run(scenario())
    assert all(made.finish == "length" for made in answers)
    mixed = [made for made in answers if set(made.versions) == {20, 21}]
    assert mixed, [made.versions for made in answers]
    for question, made in zip(asked, answers, strict=True):
        assert made.versions == sorted(made.versions)
        first = made.versions.count(20)
        tokens = [*question.tokens, *made.tokens]
        expected = old.logprobs(tokens)[3 : 3 + first]
        assert made.logprobs[:first] == pytest.approx(expected, abs=1e-4)
        if mode == "recompute":
            expected = new.logprobs(tokens)[3 + first :]
            assert made.logprobs[first:] == pytest.approx(expected, abs=1e-4)
    # What comes later does not see what former weights computed.
    later = request(seed=77, **ENDLESS)
    assert_logprobs(new, later, server.run(server.engine.generate(later)))
    old.close()
    new.close()


def test_aborted_answers_can_be_gone_on_from(server: RealServer, tmp_path: Path) -> None:
    old, new = Weights(tmp_path / "old", 5), Weights(tmp_path / "new", 6)
    asked = request(100, **ENDLESS)

    async def scenario() -> tuple[Completion, Completion]:
        engine = server.engine
        await publish(engine, old, 30, "handles")
        task = asyncio.create_task(engine.generate(asked))
        await asyncio.sleep(0.25)
        await publish(engine, new, 31, "handles", "abort")
        part = await task
        rest = await engine.generate(
            Request([*asked.tokens, *part.tokens], asked.sampling, seed=asked.seed,
                    num_sampled=len(part.tokens))
        )  # fmt: skip
        return part, rest

    part, rest = server.run(scenario())
    assert (part.finish, part.can_go_on, set(part.versions)) == ("abort", True, {30})
    assert 0 < len(part.tokens) < 100
    assert len(part.tokens) + len(rest.tokens) == 100
    assert set(rest.versions) == {31}
    assert_logprobs(old, asked, part)
    old.close()
    new.close()


def test_cuts_and_cancellations_free_the_server(server: RealServer) -> None:
    async def scenario() -> None:
        engine, cut = server.engine, CutSignal()
        asked = [
            Request([5, 6, 7, i], Sampling(max_tokens=100, ignore_eos=True), seed=i, cut=cut)
            for i in range(3, 15)
        ]
        tasks = [asyncio.create_task(engine.generate(question)) for question in asked]
        await asyncio.sleep(0.2)
        for task in tasks[:6]:
            task.cancel()
        cut.set()
        for made in await asyncio.gather(*tasks[6:]):
            assert made.finish == "length"
            assert len(made.tokens) < 100
        await asyncio.gather(*tasks[:6], return_exceptions=True)
        # The memory of all is free: it could not be dropped otherwise.
        await engine.pause("finish")
        await engine.resume()

    server.run(scenario())


def test_what_the_server_refuses(server: RealServer, weights: Weights) -> None:
    async def scenario() -> None:
        engine = server.engine
        with pytest.raises(EngineError, match="context holds 128"):
            await engine.generate(Request([5] * 129, Sampling(), seed=0))
        full = await engine.generate(Request([5] * 128, Sampling(), seed=0))
        assert full == Completion([], [], [], "length")
        near = await engine.generate(Request([5] * 100, Sampling(max_tokens=99), seed=0))
        assert near.finish in ("length", "stop")
        plan = weights.plan(50, "disk")
        await engine.pause("finish")
        broken = await plan.source.parcels().__anext__()  # type: ignore[union-attr]
        assert broken.folder is not None
        for file in Path(broken.folder).glob("*.safetensors"):
            file.write_bytes(b"broken")
        replica = engine._fleet.members[0].alive
        with pytest.raises(WeightError, match="policy 'policy'"):
            await replica.weights.take(broken, "disk")
        await engine.resume()
        await engine.generate(request())

    server.run(scenario())


def test_two_servers_one_of_which_is_killed(tmp_path: Path, weights: Weights) -> None:
    async def scenario() -> None:
        async with real_engine(tmp_path, replicas=2) as engine:
            await publish(engine, weights, 1, "collective")
            assert engine.num_serving == 2
            tasks = [
                asyncio.create_task(engine.generate(request(100, seed=i, **ENDLESS)))
                for i in range(8)
            ]
            await asyncio.sleep(0.2)
            os.kill(process_of(tmp_path / "logs/policy-sglang-0.log"), signal.SIGKILL)
            answers = await asyncio.gather(*tasks)
            assert {len(made.tokens) for made in answers} == {100}
            assert {v for made in answers for v in made.versions} == {1}
            while engine.num_serving != 1:
                await engine.generate(request())
            # The other one goes on to take weights, and the first comes back for those.
            weights.become(9)
            await publish(engine, weights, 2, "collective")
            asked = request(**ENDLESS)
            assert_logprobs(weights, asked, await engine.generate(asked))
            while len(engine._fleet.up()) != 2:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
            assert engine.num_serving == 1
            await publish(engine, weights, 3, "collective")
            assert engine.num_serving == 2

    async def bounded() -> None:
        async with asyncio.timeout(280):
            await scenario()

    asyncio.run(bounded())


def process_of(log: Path) -> int:
    """The server that writes this log: the only one that has it open and serves."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            output = os.readlink(folder / "fd/1")
        except OSError:
            continue
        if output == str(log) and b"sglang.launch_server" in command and b"-S" not in command:
            return int(folder.name)
    raise AssertionError(f"no server writes {log}")
