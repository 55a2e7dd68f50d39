"""How a feed fails, is held, and deals with stragglers."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from drivers.virtual_time import run_virtual
from feeds import FakeRunner, Pace, World, make_stream, while_feeding, world_of

from paceline.errors import ConfigError, EngineError, RewardError, RolloutError
from paceline.rollout.straggler import Straggler

# Failure


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("mode", ["wave", "continuous"])
def test_a_failing_runner_raises_its_own_exception_at_everybody(seed: int, mode: str) -> None:
    rng = random.Random(seed)
    runner = FakeRunner(["a", "b"], duration=lambda ordinal: rng.randint(1, 9))
    error = EngineError("the engine is gone")
    failing = rng.randrange(12)
    runner.failing[failing] = error
    paces = {"a": Pace(batch=3), "b": Pace(batch=4, max_staleness=2 * (mode == "continuous"))}
    world = World(paces, runner, mode=mode, stream=make_stream(100))

    async def run() -> list[Any]:
        work = [world.feed.run(), *(world.clock(name) for name in paces)]
        found = await asyncio.gather(*work, return_exceptions=True)
        assert len(asyncio.all_tasks()) == 1
        return found

    found = run_virtual(run, seed=seed, check=world.check)
    assert all(exc is error for exc in found), found
    assert not runner.running
    again = [draw.ordinal for draw in world.stream.take(1000)]
    assert failing in again
    for name, buffer in world.buffers.items():
        ready = [ordinal for ordinal, *_ in buffer.state({})["ready"]]
        assert sorted([*again, *world.books.trained.get(name, []), *ready]) == list(range(100))


def test_whoever_waits_for_quiet_gets_the_exception_too() -> None:
    runner = FakeRunner()
    runner.failing[0] = EngineError("gone")
    world = world_of(runner=runner)

    async def run() -> None:
        producer = asyncio.create_task(world.feed.run())
        await asyncio.sleep(0.1)
        with pytest.raises(EngineError) as caught:
            async with world.feed.held():
                pass
        assert caught.value is runner.failing[0]
        await asyncio.wait({producer})

    run_virtual(run)


def test_a_task_that_somebody_else_cancels_is_a_failure() -> None:
    world = world_of()

    async def look() -> None:
        await asyncio.sleep(0.5)
        world.feed._plays[0].task.cancel()
        with pytest.raises(EngineError, match="was cancelled"):
            await world.taps["policy"].collect(1)

    while_feeding(world, look)


def test_a_reward_that_may_not_fail_ends_the_run_and_gives_everything_back() -> None:
    runner = FakeRunner(rewards=lambda o, p: [None, 1.0] if o == 1 else [0.0, 1.0])
    runner.reward.on_failure = "fail"
    world = world_of(runner=runner, mode="wave")
    with pytest.raises(RewardError, match="prompt 'p"):
        run_virtual(world.train)
    assert [draw.ordinal for draw in world.stream.take(3)] == [0, 1, 2]


@pytest.mark.parametrize("mode", ["wave", "continuous"])
def test_a_wave_of_failures_in_a_row_ends_the_run(mode: str) -> None:
    runner = FakeRunner(rewards=lambda o, p: [None, None] if o > 4 else [0.0, 1.0])
    world = world_of(runner=runner, mode=mode, batch=3)
    with pytest.raises(RewardError, match="all 6 samples failed: 6 reward/timeout"):
        run_virtual(world.train)
    assert not world.feed.in_flight


def test_dropping_all_groups_ends_the_run_with_counts() -> None:
    runner = FakeRunner(rewards=lambda o, p: [1.0, 1.0], dynamic_sampling=True, max_refills=2)
    world = world_of(runner=runner, batch=3)
    with pytest.raises(RolloutError, match=r"none of 9 groups in a row.*'policy': 9 zero_variance"):
        run_virtual(world.train)


def test_a_feed_that_nothing_bounds_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing bounds sampling"):
        world_of(on_full="drop_oldest")


# Holding


def test_held_lets_what_runs_end_and_starts_nothing() -> None:
    world = world_of(batch=3, max_staleness=1)

    async def look() -> None:
        await asyncio.sleep(0.5)
        async with world.feed.held():
            assert asyncio.get_running_loop().time() == 1
            assert not world.runner.running
            async with world.feed.held():
                await world.taps["policy"].collect(1)
                world.taps["policy"].learned()
                world.taps["policy"].published(1)
            await asyncio.sleep(5)
            assert len(world.runner.calls) == 6
        await asyncio.sleep(0.5)
        assert len(world.runner.calls) == 9

    while_feeding(world, look)


def test_a_hold_that_is_given_up_lets_go() -> None:
    world = world_of(runner=FakeRunner(duration=lambda ordinal: 10))

    async def look() -> int:
        await asyncio.sleep(0.5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1), world.feed.held():
                pass
        return world.feed._num_holds

    assert while_feeding(world, look) == 0


# Stragglers


def slow_third(ordinal: int) -> float:
    return 1000.0 if ordinal == 2 else 1.0


@pytest.mark.parametrize("action", ["continue", "drop_group", "truncate"])
def test_a_straggler_is_dealt_with_once_a_step_has_waited_for_it(action: Any) -> None:
    runner = FakeRunner(["a", "b"], duration=slow_third)
    straggler = Straggler(after_s=20, action=action)
    paces = {"a": Pace(batch=2, max_staleness=1), "b": Pace(batch=3, max_staleness=1)}
    world = World(paces, runner, stream=make_stream(12), straggler=straggler)
    times: list[float] = []

    async def run() -> None:
        await world.train()
        times.append(asyncio.get_running_loop().time())
        assert len(asyncio.all_tasks()) == 1

    run_virtual(run, check=world.check)
    trained = [o for batch in world.batches["a"] for o in batch]
    dropped = action == "drop_group"
    assert trained == [o for o in range(12) if o != 2 or not dropped]
    assert times[0] > 1000 if action == "continue" else times[0] < 60
    assert runner.cut == ([2] if action == "truncate" else [])
    for name in paces:
        assert sum(v["rollout/stragglers"] for v in world.values[name]) == 1
        told = sum(v["rollout/dropped_groups/straggler"] for v in world.values[name])
        assert told == dropped
    assert not runner.running


def test_nobody_is_a_straggler_while_the_policy_is_busy() -> None:
    runner = FakeRunner(duration=lambda ordinal: 1.0 if ordinal < 2 else 30.0)
    world = world_of(
        runner=runner, batch=1, max_staleness=1, learn_s=lambda: 40, size=6,
        straggler=Straggler(after_s=5, action="drop_group"),
    )  # fmt: skip
    run_virtual(world.train)
    assert world.batches["policy"] == [[0], [1], [2], [3], [4], [5]]


def test_stragglers_need_a_runner_and_a_mode_that_can_deal_with_them() -> None:
    with pytest.raises(ConfigError, match="never stops"):
        world_of(mode="wave", straggler=Straggler(after_s=1))
    runner: Any = FakeRunner()
    runner.cut_short = None
    with pytest.raises(ConfigError, match="ended early"):
        world_of(runner=runner, straggler=Straggler(after_s=1, action="truncate"))
