"""A pause that aborts: the rest of an answer is asked for, and the answer goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from operator import add
from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from paceline.engines.base import CutSignal, Sampling
from paceline.engines.embedded import EmbeddedEngine
from paceline.rollout.actor import RecordingActor, Seat
from paceline.rollout.renderer import Renderer
from paceline.types import Draw, Prompt, Sample
from paceline.weights.base import WeightPlan

Serve = Callable[..., Any]
LONG = Sampling(max_tokens=30, ignore_eos=True)


def actors(
    engine: EmbeddedEngine, count: int, sampling: Sampling = LONG, cut: CutSignal | None = None
) -> list[RecordingActor]:
    renderer = Renderer(tiny_tokenizer(), end_ids=frozenset({1}))
    seat = Seat("policy", engine, renderer, sampling)
    draw = Draw(0, 0, Prompt("p", text="1+1="))
    return [
        RecordingActor("policy", seat, draw, episode=i, seed=partial(add, 10 * i), cut=cut)
        for i in range(count)
    ]


def speaking(them: Sequence[RecordingActor]) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(actor(Prompt("p", text="1+1="))) for actor in them]


def samples(them: Sequence[RecordingActor]) -> list[Sample]:
    found = [sample for actor in them for sample in actor.samples()]
    for sample in found:
        sample.validate()
    return found


def whole(serve: Serve, count: int, sampling: Sampling = LONG) -> list[Sample]:
    """The answers of an engine that nobody pauses."""

    async def use(engine: EmbeddedEngine) -> list[Sample]:
        them = actors(engine, count, sampling)
        await asyncio.gather(*speaking(them))
        return samples(them)

    return serve(use, tiny_model(), max_batch=2)


def test_answers_that_were_interrupted_are_those_that_were_not(
    serve: Serve, step_gate: Any
) -> None:
    """Nothing but the pause: two run, two wait, and all go on with the numbers they would have
    drawn. `max_tokens` counts the tokens of both parts."""
    model = tiny_model()

    async def use(engine: EmbeddedEngine) -> list[Sample]:
        gate = step_gate(model, at=9)
        them = actors(engine, 4)
        tasks = speaking(them)
        [pause] = await gate.during(engine.pause("abort"))
        await pause
        assert not any(task.done() for task in tasks)
        assert [actor.num_sampled for actor in them] == [10, 10, 0, 0]
        assert (engine.num_running, engine.num_waiting) == (0, 4)
        await engine.resume()
        await asyncio.gather(*tasks)
        return samples(them)

    for interrupted, expected in zip(serve(use, model, max_batch=2), whole(serve, 4), strict=True):
        assert (interrupted.tokens, interrupted.finish) == (expected.tokens, "length")
        assert interrupted.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        assert (interrupted.interruptions, expected.interruptions) == (1, 0)


def test_a_stop_text_is_found_across_an_interruption(serve: Serve, step_gate: Any) -> None:
    free = whole(serve, 1)[0]
    answer = [t for t, is_own in zip(free.tokens, free.mask, strict=True) if is_own]
    pieces = [str(tiny_tokenizer().decode(answer[first:last])) for first, last in ((0, 8), (8, 13))]
    stop, before = pieces[1], pieces[0]
    assert len(stop) > 2
    assert free.text.index(stop) == len(before)
    sampling = LONG.model_copy(update={"stop": (stop,), "ignore_eos": False})
    model = tiny_model()

    async def use(engine: EmbeddedEngine) -> Sample:
        gate = step_gate(model, at=9)  # ten tokens: the pause comes in the middle of the stop text
        them = actors(engine, 1, sampling)
        tasks = speaking(them)
        [pause] = await gate.during(engine.pause("abort"))
        await pause
        assert them[0].num_sampled == 10
        await engine.resume()
        assert (await tasks[0]).text == before
        return samples(them)[0]

    found = serve(use, model, max_batch=2)
    assert (found.finish, found.text) == ("stop", before + stop)
    assert found.tokens[-13:] == answer[:13]


def test_new_weights_go_on_from_the_tokens_so_far(serve: Serve, step_gate: Any) -> None:
    old, new = tiny_model(seed=0), tiny_model(seed=1)

    async def use(engine: EmbeddedEngine) -> list[Sample]:
        gate = step_gate(engine._model.module, at=9)
        them = actors(engine, 2)
        tasks = speaking(them)
        [pause] = await gate.during(engine.pause("abort"))
        await pause
        await engine.receive(WeightPlan("policy", 7, "copy", dict(new.named_parameters())))
        await engine.resume()
        await asyncio.gather(*tasks)
        return samples(them)

    for sample in serve(use, old, max_batch=2, weights="copy"):
        assert [v for v in sample.versions if v >= 0] == [0] * 10 + [7] * 20
        start = sample.mask.index(True)
        for model, places in (
            (old, range(start, start + 10)),
            (new, range(start + 10, start + 30)),
        ):
            with torch.no_grad():
                logprobs = model(torch.tensor([sample.tokens])).logits[0].log_softmax(-1)
            for t in places:
                expected = logprobs[t - 1, sample.tokens[t]].item()
                assert sample.logprobs[t] == pytest.approx(expected, abs=1e-5)


def test_a_cut_during_the_pause_ends_the_answer_where_it_is(serve: Serve, step_gate: Any) -> None:
    model = tiny_model()

    async def use(engine: EmbeddedEngine) -> Sample:
        gate, cut = step_gate(model, at=9), CutSignal()
        them = actors(engine, 1, cut=cut)
        tasks = speaking(them)
        [pause] = await gate.during(engine.pause("abort"))
        await pause
        cut.set()
        await tasks[0]
        return samples(them)[0]

    found = serve(use, model)
    assert (found.finish, sum(found.mask), found.cause) == ("length", 10, None)
