"""Engines that take turns: one at a time, in a fixed order, after everything has come to rest."""

from __future__ import annotations

import asyncio

import pytest
from tiny import tiny_model

from paceline.engines.base import EmbeddedEngineConfig, Request, Sampling
from paceline.engines.embedded import EmbeddedEngine
from paceline.engines.turns import Turns

SAMPLING = Sampling(max_tokens=12, ignore_eos=True)


def test_one_at_a_time_and_the_first_joined_first() -> None:
    async def body() -> list[str]:
        turns, log = Turns(), []
        places = {name: turns.add_engine() for name in "ab"}

        async def work(name: str, jobs: int) -> None:
            for _ in range(jobs):
                async with turns.turn(places[name]):
                    log.append(f"{name}+")
                    for _ in range(20):
                        await asyncio.sleep(0)
                    log.append(f"{name}-")

        await asyncio.wait_for(asyncio.gather(work("b", 3), work("a", 2)), 10)
        return log

    assert asyncio.run(body()) == ["a+", "a-", "a+", "a-", "b+", "b-", "b+", "b-", "b+", "b-"]


def test_no_turn_while_work_goes_on_outside() -> None:
    async def body() -> None:
        turns = Turns()
        place = turns.add_engine()
        entered = asyncio.Event()

        async def work() -> None:
            async with turns.turn(place):
                entered.set()

        with turns.outside():
            task = asyncio.create_task(work())
            for _ in range(100):
                await asyncio.sleep(0)
            assert not entered.is_set()
        await asyncio.wait_for(task, 10)

    asyncio.run(body())


@pytest.mark.parametrize("holds", [True, False])
def test_an_engine_that_leaves_lets_the_others_go_on(holds: bool) -> None:
    async def body() -> None:
        turns = Turns()
        first, second = turns.add_engine(), turns.add_engine()
        if holds:
            async with turns.turn(first):
                turns.leave(first)
        else:
            with turns.outside():
                waiting = asyncio.create_task(_enter(turns, first))
                await asyncio.sleep(0)
                turns.leave(first)
                await asyncio.wait_for(waiting, 10)
        await asyncio.wait_for(_enter(turns, second), 10)

    asyncio.run(body())


async def _enter(turns: Turns, place: int) -> None:
    async with turns.turn(place):
        pass


def test_a_cancelled_wait_gives_the_turn_on() -> None:
    async def body() -> None:
        turns = Turns()
        first, second = turns.add_engine(), turns.add_engine()
        task = asyncio.create_task(_enter(turns, first))
        other = asyncio.create_task(_enter(turns, second))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait_for(other, 10)

    asyncio.run(body())


def chatter(seed: int) -> list[list[tuple[list[int], list[float]]]]:
    """Episodes that go from one engine to the other; what waits on chance is the order of it."""

    async def body() -> list[list[tuple[list[int], list[float]]]]:
        turns = Turns()
        engines = [
            EmbeddedEngine(
                EmbeddedEngineConfig(max_batch=4, weights="copy"),
                tiny_model(seed=index),
                None,
                policy=name,
                eos_token_ids=frozenset({1}),
                turns=turns,
            )
            for index, name in enumerate("ab")
        ]

        async def episode(number: int) -> list[tuple[list[int], list[float]]]:
            for _ in range((number * 7 + seed * 3) % 5):
                await asyncio.sleep(0)
            tokens, said = [3 + number], []
            for turn in range(3):
                limit = 4 + (number * 5 + turn) % 9
                sampling = SAMPLING.model_copy(update={"max_tokens": limit})
                request = Request(tokens, sampling, seed=100 * number + turn, group=f"{number:02}")
                answer = await engines[turn % 2].generate(request)
                tokens = [*tokens, *answer.tokens]
                said.append((answer.tokens, answer.logprobs))
            return said

        order = sorted(range(10), key=lambda n: (n * 7 + seed) % 10)
        tasks = {n: asyncio.create_task(episode(n)) for n in order}
        try:
            await asyncio.wait_for(asyncio.gather(*tasks.values()), 60)
            return [tasks[n].result() for n in range(10)]
        finally:
            for engine in engines:
                await engine.aclose()

    return asyncio.run(body())


def test_joint_episodes_are_reproducible_to_the_last_bit() -> None:
    first = chatter(0)
    assert all(chatter(seed) == first for seed in range(1, 4))
