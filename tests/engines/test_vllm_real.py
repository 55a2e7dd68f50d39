"""A real vLLM server: one for all tests, with a tiny Llama on the CPU whose embeddings are tied."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.sglang_real import Moment, RealServer, Weights, request
from engines.sglang_real import logprobs as logprobs_of
from engines.vllm_real import SHAPE, real_engine
from tiny import tiny_tokenizer

from paceline.engines.base import Completion, CutSignal, Request, Sampling
from paceline.engines.router import RoutedEngine
from paceline.errors import EngineError, WeightError
from paceline.weights.base import Parcel, Transport
from paceline.weights.check import check_weights
from paceline.weights.disk import WeightFolder
from paceline.weights.settings import WeightCheckConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("vllm")]

ENDLESS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    server = RealServer(tmp_path_factory.mktemp("vllm"), real_engine)
    yield server
    server.close()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weights]:
    weights = Weights(tmp_path_factory.mktemp("weights"), **SHAPE)
    yield weights
    weights.close()


def logprobs(seed: int, tokens: list[int], temperature: float = 1.0) -> list[float]:
    return logprobs_of(seed, tokens, temperature, **SHAPE)


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
    again = server.run(ask())
    assert [made.tokens for made in again] == [made.tokens for made in answers]


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
    hot = {"temperature": 2.0}
    plain = server.run(server.engine.generate(request(40, **hot, **ENDLESS)))
    place, text = next(
        (i, text)
        for i in range(1, 39)
        if len(text := tiny_tokenizer().decode(plain.tokens[i : i + 2])) == 2
        and 1 not in plain.tokens[: i + 2]
    )
    token = plain.tokens[place]
    by_text = server.run(server.engine.generate(request(40, **hot, stop=(text,))))
    by_token = server.run(server.engine.generate(request(40, **hot, stop_token_ids=(token,))))
    assert by_token.tokens == plain.tokens[: plain.tokens.index(token) + 1]
    assert (by_token.finish, by_token.stop) == ("stop", token)
    assert by_text.tokens == plain.tokens[: place + 2]
    assert (by_text.finish, by_text.stop) == ("stop", text)
    assert len(by_text.logprobs) == len(by_text.versions) == len(by_text.tokens)


def test_the_rest_of_an_answer(server: RealServer) -> None:
    """Its random numbers are others than those of the beginning."""
    asked = request(40, **ENDLESS)
    whole = server.run(server.engine.generate(asked))
    rest = server.run(
        server.engine.generate(
            Request([*asked.tokens, *whole.tokens[:20]], asked.sampling, seed=0, num_sampled=20)
        )
    )
    assert len(rest.tokens) == 20
    assert rest.tokens != whole.tokens[:20]


@pytest.mark.parametrize("transport", ["handles", "collective", "disk"])
def test_new_weights_serve_from_the_next_token_on(
    server: RealServer, weights: Weights, transport: Transport
) -> None:
    """The output layer is tied: on a CPU it has a copy of its own, which an update may miss."""
    for seed in (3, 4, 3):
        version = server.engine.version + 1
        server.run(publish(server.engine, weights, version, seed, transport))
        asked = request(seed=version, **ENDLESS)
        made = server.run(server.engine.generate(asked))
        assert made.versions == [version] * 12
        assert_logprobs(seed, asked, made)
        server.run(check_weights(server.engine, weights.plan(version, transport)))
    weights.become(8)
    with pytest.raises(WeightError, match=r"server 0.*15 of 20 tensors differ"):
        server.run(check_weights(server.engine, weights.plan(version, transport)))


def test_a_publish_of_what_changed(server: RealServer, weights: Weights, tmp_path: Path) -> None:
    """One part of a fused layer, of which the server keeps the whole alone."""
    engine = server.engine
    version = engine.version + 1
    folder = WeightFolder(tmp_path / "weights", file_bytes=1)
    named = {name: p.detach() for name, p in weights.model.named_parameters()}

    async def scenario() -> None:
        await publish(engine, weights, version, 3)
        folder.write(1, named.items())
        folder.acknowledge()
        named["model.layers.1.self_attn.k_proj.weight"].mul_(2)
        full, changed = folder.write(2, named.items())
        assert changed is not None
        told = (changed / "manifest.json").read_text()
        assert "k_proj" in told
        assert "q_proj" not in told
        await engine.pause("finish")
        taker = engine._fleet.members[0].alive.weights
        await taker.begin("disk")
        await taker.take(Parcel((), folder=str(full), changed=str(changed)), "disk")
        await taker.end(version)
        await engine.resume()
        await check_weights(engine, weights.plan(version, "handles"))

    server.run(scenario())


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
        old = engine.version + 1
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

    async def scenario(delay_s: float, old: int) -> tuple[Completion, Completion]:
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
        old = engine.version + 1
        part, rest = server.run(scenario(delay_s, old))
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
        replica = engine._fleet.members[0].alive
        await engine.pause("finish")
        found = await replica._control("/reset_prefix_cache")  # type: ignore[attr-defined]
        assert found == {"success": True}
        await engine.resume()
        return min(len(made.tokens) for made in answers)

    moment = Moment()
    for delay_s in moment:
        if server.run(scenario(delay_s)) < 100:
            break
        moment.was(late=True)
    else:
        pytest.fail("no answer was met under way")


def test_weights_that_were_reset(server: RealServer, weights: Weights) -> None:
    engine = server.engine
    version = engine.version + 1
    skip = "model.layers.0.*"

    async def scenario() -> None:
        await publish(engine, weights, version, 3)
        plan = weights.plan(version, "handles")
        await engine.pause("finish")
        await engine.reset(plan, WeightCheckConfig(when="first", reset=True, skip=(skip,)))
        with pytest.raises(WeightError, match="11 of 20 tensors differ"):
            await check_weights(engine, plan)
        await engine.receive(weights.plan(version + 1, "handles"))
        await engine.resume()
        await check_weights(engine, weights.plan(version + 1, "handles"))
        asked = request(**ENDLESS)
        assert_logprobs(3, asked, await engine.generate(asked))

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
        await engine.pause("finish")
        taker = engine._fleet.members[0].alive.weights
        with pytest.raises(WeightError, match="no update of weights was begun"):
            await taker.end(9)
        await taker.begin("disk")
        with pytest.raises(WeightError, match=r"policy 'policy'.*can not be read"):
            await taker.take(Parcel((), folder="/nowhere"), "disk")
        with pytest.raises(WeightError, match=r"policy 'policy'.*no handles of tensors"):
            await taker.take(Parcel((), handles=("bm90IGEgcGlja2xl",)), "handles")
        parcels = weights.plan(1, "handles").source.parcels()  # type: ignore[union-attr]
        async for parcel in parcels:
            await taker.take(parcel, "handles")
            break
        await parcels.aclose()  # type: ignore[attr-defined]
        with pytest.raises(WeightError, match=r"weights of \d+ layers did not come"):
            await taker.end(9)
        # The next one is not disturbed by what was left.
        await engine.receive(weights.plan(engine.version + 1, "handles"))
        await engine.resume()
        await engine.generate(request())
        await check_weights(engine, weights.plan(engine.version, "handles"))

    server.run(scenario())
