from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rollout_fakes import (
    FakeReward,
    ScriptedEngine,
    draws,
    ids,
    said,
    text_of,
)
from runners import Actors, collect, make, statuses

from paceline.engines.base import Completion, Request
from paceline.errors import EngineError
from paceline.rollout.score import Score
from paceline.types import Draw, Prompt


def test_groups_come_in_the_order_of_the_draws_with_scored_samples() -> None:
    engine = ScriptedEngine(lambda request: said(text_of(request.tokens)[0]))
    reward = FakeReward(lambda prompt, completion: Score(float(completion), {"a": 2.0}))
    groups = collect(make(engine, reward=reward), "3=", "1=", "2=")
    assert [group.prompt.text for group in groups] == ["3=", "1=", "2="]
    assert [group.draw for group in groups] == [0, 1, 2]
    assert [[s.reward for s in group.samples()] for group in groups] == [[3, 3], [1, 1], [2, 2]]
    assert all(s.reward_parts == {"a": 2.0} for group in groups for s in group.samples())
    assert [[e.index for e in group.episodes] for group in groups] == [[0, 1]] * 3
    assert statuses(groups) == [("completed", None)] * 6
    assert collect(make(engine)) == []


def test_the_engine_sees_every_request_before_it_answers_one() -> None:
    class Waiting(ScriptedEngine):
        async def generate(self, request: Request) -> Completion:
            self.requests.append(request)
            await asyncio.sleep(0)
            seen.append(len(self.requests))
            return said("1")

    seen: list[int] = []
    engine = Waiting(lambda request: said("1"))
    collect(make(engine), "1", "2", "3")
    assert seen == [6] * 6
    assert [text_of(request.tokens) for request in engine.requests] == list("112233")
    assert [request.group for request in engine.requests] == [
        f"policy/{i}" for i in (0, 0, 1, 1, 2, 2)
    ]


def seeds(draws_: list[Draw], **options: Any) -> dict[tuple[int, int], int]:
    engine = ScriptedEngine(lambda request: said("1"))
    runner = make(engine, **options)
    groups = asyncio.run(runner.collect(draws_, step=1))
    found = iter(engine.requests)
    return {(g.draw, e.index): next(found).seed for g in groups for e in g.episodes}


def test_seeds_are_distinct_and_depend_on_nothing_but_their_place() -> None:
    all_draws = draws(*"12345678")
    at_once = seeds(all_draws, samples_per_prompt=4)
    assert len(set(at_once.values())) == 32
    assert seeds(all_draws, samples_per_prompt=4) == at_once
    chunked = seeds(all_draws[5:], samples_per_prompt=4) | seeds(
        all_draws[:5], samples_per_prompt=4
    )
    assert chunked == at_once
    for other in ({"run_seed": 1}, {"policy": "other"}, {"purpose": "eval/held"}):
        different = seeds(all_draws, samples_per_prompt=4, **other)
        assert not set(different.values()) & set(at_once.values())
    again = Draw(8, 1, all_draws[0].prompt)
    assert not set(seeds([again]).values()) & set(at_once.values())


def test_later_turns_and_retries_have_seeds_of_their_own() -> None:
    def answer(request: Request) -> Completion | Exception:
        return EngineError("busy") if len(engine.requests) == 1 else said("1")

    async def twice(prompt: Prompt, actors: Actors) -> float:
        await actors["policy"](prompt)
        await actors["policy"]("again")
        return 1.0

    engine = ScriptedEngine(answer)
    collect(make(engine, env=twice, samples_per_prompt=1), "1", "2")
    assert len(engine.requests) == 5
    assert len({request.seed for request in engine.requests}) == 5


def test_cut_off_and_aborted_answers() -> None:
    def answer(request: Request) -> Completion:
        return said("1", {"1": "length", "2": "abort"}.get(text_of(request.tokens), "stop"))  # type: ignore[arg-type]

    engine = ScriptedEngine(answer)
    groups = collect(make(engine, samples_per_prompt=1, episode_retries=0), "1", "2", "3")
    assert statuses(groups) == [
        ("truncated", None),
        ("aborted", "engine/abort"),
        ("completed", None),
    ]
    assert [s.reward for group in groups for s in group.samples()] == [1.0, None, 1.0]


def test_an_episode_that_was_not_served_is_played_again_and_keeps_its_siblings() -> None:
    """Case 51."""

    def answer(request: Request) -> Completion | Exception:
        match len(engine.requests):
            case 2:
                return EngineError("busy")
            case 3:
                return said("9", "abort")
        return said("1")

    engine = ScriptedEngine(answer)
    groups = collect(make(engine), "1", "2")
    assert statuses(groups) == [("completed", None)] * 4
    assert len(engine.requests) == 6


def test_a_refusal_that_stays_is_a_failed_sample_and_its_siblings_live() -> None:
    def answer(request: Request) -> Completion | Exception:
        return EngineError("too long for 8") if text_of(request.tokens) == "2" else said("1")

    groups = collect(make(ScriptedEngine(answer), samples_per_prompt=1), "1", "2")
    assert statuses(groups) == [("completed", None), ("failed", "engine/refused")]
    (sample,) = groups[1].samples()
    assert sample.detail == "too long for 8"
    assert (sample.tokens, any(sample.mask), sample.reward) == (ids("2"), False, None)


def test_an_environment_that_hides_a_refusal_does_not_hide_it_from_the_run() -> None:
    async def env(prompt: Prompt, actors: Actors) -> float:
        try:
            await actors["policy"](prompt)
        except EngineError:
            return 1.0
        return 0.5

    def answer(request: Request) -> Completion | Exception:
        return EngineError("no") if text_of(request.tokens) == "2" else said("1")

    groups = collect(make(ScriptedEngine(answer), env=env, samples_per_prompt=1), "1", "2")
    assert statuses(groups) == [("completed", None), ("failed", "engine/refused")]


def test_a_broken_engine_ends_everything_with_its_own_exception() -> None:
    cancelled = []

    async def env(prompt: Prompt, actors: Actors) -> float:
        try:
            if prompt.text == "2":
                await actors["policy"](prompt)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(prompt.text)
            raise
        return 1.0

    fault = RuntimeError("CUDA error: device-side assert")
    runner = make(ScriptedEngine(lambda request: fault), env=env, samples_per_prompt=1)
    with pytest.raises(RuntimeError) as caught:
        collect(runner, "1", "2", "3")
    assert caught.value is fault
    assert sorted(cancelled) == ["1", "3"]


def test_a_broken_engine_is_not_hidden_by_the_environment() -> None:
    async def env(prompt: Prompt, actors: Actors) -> float:
        try:
            await actors["policy"](prompt)
        except Exception:
            return 0.0
        return 1.0

    with pytest.raises(RuntimeError, match="out of memory"):
        collect(make(ScriptedEngine(lambda request: RuntimeError("out of memory")), env=env), "1")


def test_an_engine_that_serves_nobody_ends_the_run_with_its_own_exception() -> None:
    with pytest.raises(EngineError, match="asleep"):
        collect(make(ScriptedEngine(lambda request: EngineError("asleep"))), "1", "2")


def test_cancelling_cancels_every_episode() -> None:
    ended = []

    async def env(prompt: Prompt, actors: Actors) -> float:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(prompt.text)
        return 1.0

    async def run() -> None:
        runner = make(ScriptedEngine(lambda request: said("1")), env=env)
        task = asyncio.create_task(runner.collect(draws("1", "2"), step=1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
    assert ended == ["1", "1", "2", "2"]
