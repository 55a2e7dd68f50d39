"""After every standstill of sampling, as many groups are sampled as before."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from drivers.virtual_time import run_virtual
from feeds import FakeRunner, World, world_of

MOMENT_S = 0.001
"""Everything else happens at whole seconds."""


def make(seed: int) -> World:
    rng = random.Random(seed)
    runner = FakeRunner(
        duration=lambda ordinal: 1 + ordinal * 7 % 10,
        rewards=lambda ordinal, policy: (None, None) if ordinal % 5 == 3 else (0.0, 1.0),
    )
    return world_of(
        runner=runner, batch=4, max_staleness=rng.randint(1, 3), size=5000,
        learn_s=lambda: rng.randint(1, 9),
    )  # fmt: skip


def check_after(world: World, seed: int, barrier: Callable[[World], Awaitable[None]]) -> None:
    rng = random.Random(-seed)
    buffer = world.buffers["policy"]

    async def disturb() -> None:
        for _ in range(10):
            await asyncio.sleep(rng.randint(5, 30) + 0.5)
            await barrier(world)
            await asyncio.sleep(MOMENT_S)
            assert buffer.num_free == 0, f"{buffer.num_free} slots are free, and nothing begins"
            assert len(world.runner.running) == buffer.num_running == len(world.feed.in_flight)

    async def run() -> None:
        clock = asyncio.create_task(world.clock("policy"))
        await disturb()
        assert not clock.done()
        clock.cancel()

    async def fed() -> None:
        world.producer = asyncio.create_task(world.feed.run())  # type: ignore[attr-defined]
        try:
            await run()
        finally:
            world.producer.cancel()  # type: ignore[attr-defined]
            await asyncio.wait({world.producer})  # type: ignore[attr-defined]

    run_virtual(fed, seed=seed, check=world.check)
    assert len(world.batches["policy"]) > 5


@pytest.mark.parametrize("seed", range(1, 9))
def test_after_everything_had_to_come_to_rest(seed: int) -> None:
    async def barrier(world: World) -> None:
        async with world.feed.held():
            assert not world.feed.in_flight
            assert not world.runner.running
            await asyncio.sleep(random.Random(seed).choice([0, 5]))

    check_after(make(seed), seed, barrier)


@pytest.mark.parametrize("seed", range(1, 9))
def test_after_the_sampler_was_ended_and_began_again(seed: int) -> None:
    """Nothing is counted as running that was cancelled, and its prompts come first again."""
    world = make(seed)

    async def barrier(world: World) -> None:
        interrupted = [draw.ordinal for draw in world.feed.in_flight]
        producer: asyncio.Task[None] = world.producer  # type: ignore[attr-defined]
        producer.cancel()
        await asyncio.wait({producer})
        assert not world.feed.in_flight
        assert world.buffers["policy"].num_running == 0
        num_calls = len(world.runner.calls)
        world.producer = asyncio.create_task(world.feed.run())  # type: ignore[attr-defined]
        await asyncio.sleep(MOMENT_S)
        begun = [ordinal for call in world.runner.calls[num_calls:] for ordinal in call]
        assert sorted(begun)[: len(interrupted)] == interrupted

    check_after(world, seed, barrier)
    trained = [ordinal for batch in world.batches["policy"] for ordinal in batch]
    assert trained == sorted(set(trained))
    assert [o for o in range(max(trained)) if o % 5 != 3 and o not in set(trained)] == []
