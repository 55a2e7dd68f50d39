"""Real SGLang servers: two for all tests, with a tiny Llama on the CPU."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.sglang_real import Moment, RealServer, Weights, config, logprobs, request
from tiny import tiny_tokenizer

from paceline.engines.base import Completion, CutSignal, Request, Sampling
from paceline.engines.router import RoutedEngine
from paceline.engines.sglang_open import open_sglang
from paceline.errors import EngineError, WeightError
from paceline.models import ModelConfig
from paceline.weights.base import Parcel, Transport
from paceline.weights.check import check_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("sglang")]

ENDLESS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    server = RealServer(tmp_path_factory.mktemp("sglang"), replicas=2)
    yield server
    server.close()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weights]:
    weights = Weights(tmp_path_factory.mktemp("weights"))
    yield weights
    weights.close()


def assert_logprobs(seed: int, asked: Request, made: Completion) -> None:
    """What the engine says of its answer is what the model of this seed says."""
    tokens = [*asked.tokens, *made.tokens]
    expected = logprobs(seed, tokens, asked.sampling.temperature)[len(asked.tokens) :]
    assert made.logprobs == pytest.approx(expected, abs=1e-4)


async def publish(
    engine: RoutedEngine,
    weights: Weights,
    version: int,
    seed: int,
    transport: Transport = "handles",
    mode: Any = "finish",
) -> None:
    weights.become(seed)
    await engine.pause(mode)
    await engine.receive(weights.plan(version, transport))
    await engine.resume()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_log_probs_are_those_at_the_temperature(server: RealServer, temperature: float) -> None:
    """Of the weights in the model's folder: nothing has been published yet."""
    asked = [request(seed=i, temperature=temperature) for i in range(8)]

    async def ask() -> list[Completion]:
        return await asyncio.gather(*map(server.engine.generate, asked))

    answers = server.run(ask())
    for question, made in zip(asked, answers, strict=True):
        assert_logprobs(0, question, made)
        assert made.versions == [0] * len(made.tokens)
        assert made.finish in ("stop", "length")
        if made.finish == "stop":
            assert made.tokens[-1] == made.stop == 1
    assert len({tuple(made.tokens) for made in answers}) > 1


def test_scores_and_greedy_answers(server: RealServer) -> None:
    tokens = [5, 9, 12, 30, 31, 7]
    scores = server.run(server.engine.score(tokens))
    assert scores == pytest.approx(logprobs(0, tokens), abs=1e-4)
    greedy = request(temperature=0.0, **ENDLESS)
    first, second = (server.run(server.engine.generate(greedy)) for _ in range(2))
    assert first.tokens == second.tokens
    whole = [*greedy.tokens, *first.tokens]
    assert first.logprobs == pytest.approx(logprobs(0, whole)[3:], abs=1e-4)


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
    server: RealServer, weights: Weights, transport: Transport
) -> None:
    for seed in (3, 4, 3):
        version = server.engine.version + 1
        server.run(publish(server.engine, weights, version, seed, transport))
        for _ in server.engine._fleet.members:
            asked = request(seed=version, **ENDLESS)
            made = server.run(server.engine.generate(asked))
            assert made.versions == [version] * 12
            assert_logprobs(seed, asked, made)
        server.run(check_weights(server.engine, weights.plan(version, transport)))
    weights.become(8)
    with pytest.raises(WeightError, match=r"server 0.*tensors differ.*server 1.*tensors differ"):
        server.run(check_weights(server.engine, weights.plan(version, transport)))


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_answers_that_go_on_with_new_weights(
    server: RealServer, weights: Weights, mode: Any
) -> None:
    engine, asked = server.engine, [request(100, seed=i, **ENDLESS) for i in range(4)]
    old = engine.version + 1

    async def scenario(delay_s: float) -> list[Completion]:
        await publish(engine, weights, old, 5)
        tasks = [asyncio.create_task(engine.generate(question)) for question in asked]
        await asyncio.sleep(delay_s)
        await publish(engine, weights, old + 1, 6, mode=mode)
        return await asyncio.gather(*tasks)

    moment = Moment()
    for delay_s in moment:
        answers = server.run(scenario(delay_s))
        assert all(made.finish == "length" for made in answers)
        if any(set(made.versions) == {old, old + 1} for made in answers):
            break
        moment.was(late=any(old in made.versions for made in answers))
    else:
        pytest.fail(f"no answer saw both: {[made.versions for made in answers]}")
    for question, made in zip(asked, answers, strict=True):
        assert made.versions == sorted(made.versions)
        first = made.versions.count(old)
        tokens = [*question.tokens, *made.tokens]
        expected = logprobs(5, tokens)[3 : 3 + first]
        assert made.logprobs[:first] == pytest.approx(expected, abs=1e-4)
        if mode == "recompute":
            expected = logprobs(6, tokens)[3 + first :]
            assert made.logprobs[first:] == pytest.approx(expected, abs=1e-4)
    # What comes later does not see what former weights computed.
    later = request(seed=77, **ENDLESS)
    assert_logprobs(6, later, server.run(engine.generate(later)))


def test_aborted_answers_can_be_gone_on_from(server: RealServer, weights: Weights) -> None:
    engine, asked = server.engine, request(100, **ENDLESS)
    old = engine.version + 1

    async def scenario(delay_s: float) -> tuple[Completion, Completion]:
        await publish(engine, weights, old, 5)
        task = asyncio.create_task(engine.generate(asked))
        await asyncio.sleep(delay_s)
        await publish(engine, weights, old + 1, 6, mode="abort")
        part = await task
        rest = await engine.generate(
            Request([*asked.tokens, *part.tokens], asked.sampling, seed=asked.seed,
                    num_sampled=len(part.tokens))
        )  # fmt: skip
        return part, rest

    moment = Moment()
    for delay_s in moment:
        part, rest = server.run(scenario(delay_s))
        if 0 < len(part.tokens) < 100:
            break
        moment.was(late=len(part.tokens) == 100)
    else:
        pytest.fail(f"the answer was not caught under way, but at {len(part.tokens)} tokens")
    assert (part.finish, part.can_go_on, set(part.versions)) == ("abort", True, {old})
    assert len(part.tokens) + len(rest.tokens) == 100
    assert set(rest.versions) == {old + 1}
    assert_logprobs(5, asked, part)


def test_cuts_and_cancellations_free_the_server(server: RealServer) -> None:
    async def scenario(delay_s: float) -> int:
        engine, cut = server.engine, CutSignal()
        asked = [
            Request([5, 6, 7, i], Sampling(max_tokens=100, ignore_eos=True), seed=i, cut=cut)
            for i in range(3, 15)
        ]
        tasks = [asyncio.create_task(engine.generate(question)) for question in asked]
        await asyncio.sleep(delay_s)
        for task in tasks[:6]:
            task.cancel()
        cut.set()
        answers = await asyncio.gather(*tasks[6:])
        assert {made.finish for made in answers} == {"length"}
        await asyncio.gather(*tasks[:6], return_exceptions=True)
        # The memory of all is free: it could not be dropped otherwise.
        await engine.pause("finish")
        await engine.resume()
        return max(len(made.tokens) for made in answers)

    moment = Moment()
    for delay_s in moment:
        if server.run(scenario(delay_s)) < 100:
            break
        moment.was(late=True)
    else:
        pytest.fail("the answers were not met under way")


def test_what_the_server_refuses(server: RealServer) -> None:
    async def scenario() -> None:
        engine = server.engine
        with pytest.raises(EngineError, match="context holds 128"):
            await engine.generate(Request([5] * 129, Sampling(), seed=0))
        full = await engine.generate(Request([5] * 128, Sampling(), seed=0))
        assert full == Completion([], [], [], "length")
        near = await engine.generate(Request([5] * 100, Sampling(max_tokens=99), seed=0))
        assert near.finish in ("length", "stop")
        await engine.pause("finish")
        replica = engine._fleet.members[0].alive
        with pytest.raises(WeightError, match="policy 'policy'"):
            await replica.weights.take(Parcel((), folder="/nowhere"), "disk")
        with pytest.raises(WeightError, match="policy 'policy'"):
            await replica.weights.take(Parcel((), handles=("bm90IGEgcGlja2xl",)), "handles")
        await engine.resume()
        await engine.generate(request())

    server.run(scenario())


def test_servers_behind_their_own_router(
    server: RealServer, weights: Weights, tmp_path: Path
) -> None:
    version = server.engine.version + 1
    asked = [request(seed=i, **ENDLESS) for i in range(8)]

    async def answers_hold(engine: RoutedEngine, version: int, seed: int) -> None:
        answers = await asyncio.gather(*map(engine.generate, asked))
        for question, made in zip(asked, answers, strict=True):
            assert_logprobs(seed, question, made)
            assert made.versions == [version] * 12

    async def scenario() -> None:
        await publish(server.engine, weights, version, 4)
        engine = await open_sglang(
            config(urls=tuple(server.engine.addresses), router="sglang"),
            ModelConfig(path=str(server.folder / "model")),
            tiny_tokenizer(),
            policy="policy",
            version=version,
            folder=tmp_path,
        )
        try:
            await answers_hold(engine, version, 4)
            await publish(engine, weights, version + 1, 5, "disk")
            await answers_hold(engine, version + 1, 5)
            cut = CutSignal()
            long = Request([5, 6, 7], Sampling(max_tokens=100, ignore_eos=True), seed=0, cut=cut)
            tasks = [asyncio.create_task(engine.generate(long)) for _ in range(8)]
            await asyncio.sleep(0.2)
            cut.set()
            assert {made.finish for made in await asyncio.gather(*tasks)} == {"length"}
            await engine.pause("finish")  # at once, or after all that is left
            assert engine.num_running == 0
            await engine.resume()
        finally:
            await engine.aclose()
        await publish(server.engine, weights, version + 2, 5)

    server.run(scenario())


def test_one_of_the_servers_is_killed(server: RealServer, weights: Weights) -> None:
    """The last of the tests: it waits for a server to start."""
    engine = server.engine
    version = engine.version + 1

    async def scenario() -> None:
        await publish(engine, weights, version, 2, "collective")
        assert engine.num_serving == 2
        tasks = [
            asyncio.create_task(engine.generate(request(100, seed=i, **ENDLESS))) for i in range(8)
        ]
        await asyncio.sleep(0.2)
        os.kill(process_of(server.folder / "logs/policy-sglang-0.log"), signal.SIGKILL)
        answers = await asyncio.gather(*tasks)
        assert {len(made.tokens) for made in answers} == {100}
        assert {v for made in answers for v in made.versions} == {version}
        while engine.num_serving != 1:
            await engine.generate(request())
        # The other one goes on to take weights, and the first comes back for those.
        await publish(engine, weights, version + 1, 9, "collective")
        asked = request(**ENDLESS)
        assert_logprobs(9, asked, await engine.generate(asked))
        while len(engine._fleet.up()) != 2:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        assert engine.num_serving == 1
        await publish(engine, weights, version + 2, 9, "collective")
        assert engine.num_serving == 2
        await engine.pause("finish")
        assert await engine.holds(weights.plan(version + 2, "collective")) == []

    server.run(scenario(), timeout_s=280.0)


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
