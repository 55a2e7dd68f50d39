from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from drivers.virtual_time import DeadlockError, run_virtual
from feeds import FakeRunner, Pace, World, make_stream, while_feeding, world_of
from rollout_fakes import FakeReward, FakeStream, ScriptedEngine, renderer, said, text_of

from paceline.data.buffer import Buffer
from paceline.drivers.feeding import FromFeed
from paceline.engines.base import Completion, Request
from paceline.errors import (
    CheckpointError,
    ResumeMismatchError,
)
from paceline.observe.catalogue import describe
from paceline.rollout.batch import RolloutBatch, collect_batch
from paceline.rollout.feed import Feed
from paceline.rollout.runner import Runner
from paceline.rollout.settings import RolloutConfig
from paceline.rollout.single_turn import SingleTurn
from paceline.rollout.straggler import Straggler
from paceline.types import Draw, Group, Status

# What is started, and when


def test_continuous_sampling_keeps_every_slot_busy_unless_the_head_blocks() -> None:
    rng = random.Random(0)
    runner = FakeRunner(duration=lambda ordinal: 1 + ordinal * 7 % 10)
    world = world_of(runner=runner, batch=4, max_staleness=2, learn_s=lambda: rng.randint(0, 9))
    buffer = world.buffers["policy"]
    busy: list[int] = []

    async def watch() -> None:
        # Everything else happens at whole seconds, so at half of one all is at rest.
        await asyncio.sleep(0.5)
        while True:
            assert buffer.num_free == 0
            assert len(runner.running) == buffer.num_running
            busy.append(len(runner.running))
            await asyncio.sleep(1)

    async def run() -> None:
        watcher = asyncio.create_task(watch())
        await world.train(40)
        assert not watcher.done()
        watcher.cancel()

    run_virtual(run, check=world.check)
    assert max(busy) == 12
    assert len(busy) > 100


def test_max_in_flight_is_kept() -> None:
    world = world_of(batch=4, max_staleness=2, max_in_flight=3)

    async def look() -> list[int]:
        sizes = []
        for _ in range(4):
            await asyncio.sleep(0.6)
            sizes.append(len(world.runner.running))
        return sizes

    assert while_feeding(world, look) == [3, 3, 3, 3]


def test_waves_start_what_fits_and_wait_for_all_of_it() -> None:
    runner = FakeRunner(["a", "b"], duration=lambda ordinal: 1 + ordinal)
    paces = {"a": Pace(batch=2, learn_s=lambda: 3), "b": Pace(batch=3, learn_s=lambda: 5)}
    world = World(paces, runner, stream=make_stream(12), mode="wave")
    run_virtual(world.train, check=world.check)
    assert runner.calls == [[0, 1], [2], [3], [4, 5], [6, 7], [8], [9], [10, 11]]
    assert world.batches == {
        "a": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]],
        "b": [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]],
    }


def test_a_wave_waits_for_the_one_before_even_where_there_are_slots() -> None:
    runner = FakeRunner(duration=lambda ordinal: 1 + ordinal)
    world = world_of(runner=runner, mode="wave", batch=2, max_staleness=2)

    async def look() -> list[set[int]]:
        found = []
        for _ in range(6):
            await asyncio.sleep(1)
            found.append(set(runner.running))
        return found

    assert while_feeding(world, look)[::3] == [{0, 1}, {2, 3}]


def test_the_lengths_that_are_trained_are_those_offered() -> None:
    """Long answers are neither starved nor put off to the end."""
    lengths = [1 + random.Random(ordinal).randrange(50) for ordinal in range(400)]
    runner = FakeRunner(duration=lambda ordinal: lengths[ordinal])
    world = world_of(runner=runner, batch=8, max_staleness=2, size=400)
    run_virtual(world.train, check=world.check)
    trained = [lengths[o] for batch in world.batches["policy"] for o in batch]
    assert trained == lengths
    tenths = [sum(trained[i : i + 40]) for i in range(0, 400, 40)]
    assert tenths == [sum(lengths[i : i + 40]) for i in range(0, 400, 40)]


def test_a_slow_partner_that_drops_never_blocks_and_is_bounded() -> None:
    def steps(partner: dict[str, Pace]) -> tuple[int, World]:
        runner = FakeRunner(["fast", *partner])
        world = World({"fast": Pace(batch=2, max_staleness=1), **partner}, runner)

        async def run() -> None:
            try:
                async with asyncio.timeout(200):
                    await world.train()
            except TimeoutError:
                pass

        run_virtual(run, check=world.check)
        return world.steps["fast"], world

    alone, _ = steps({})
    together, world = steps(
        {"slow": Pace(batch=3, max_staleness=1, on_full="drop_oldest", learn_s=lambda: 50)}
    )
    assert together == alone
    assert world.steps["slow"] >= 3
    assert sum(v["rollout/dropped_groups/oldest"] for v in world.values["slow"]) > 50
    waiting, _ = steps({"slow": Pace(batch=3, max_staleness=1, learn_s=lambda: 50)})
    assert waiting < alone / 2


def test_staleness_is_told_in_steps() -> None:
    world = world_of(batch=1, max_staleness=3, learn_s=lambda: 10)
    run_virtual(lambda: world.train(8), check=world.check)
    found = [values["rollout/staleness"] for values in world.values["policy"]]
    assert found == [0, 1, 2, 3, 3, 3, 3, 3]
    assert world.values["policy"][5]["rollout/staleness_max"] == 3
    assert world.values["policy"][5]["rollout/buffer_groups"] == 2


def test_every_metric_is_in_the_catalogue() -> None:
    runner = FakeRunner(["policy", "slow"], duration=lambda o: 100 if o == 5 else 1)
    paces = {"policy": Pace(max_staleness=1), "slow": Pace(batch=2, on_full="drop_oldest")}
    straggler = Straggler(after_s=10, action="drop_group")
    world = World(paces, runner, stream=make_stream(24), straggler=straggler)
    run_virtual(world.train, check=world.check)
    names = {name for rows in world.values.values() for row in rows for name in row}
    assert names >= {
        "rollout/staleness", "rollout/staleness_max", "rollout/buffer_groups",
        "rollout/stragglers", "rollout/dropped_groups/oldest", "rollout/dropped_groups/straggler",
    }  # fmt: skip
    assert [name for name in names if not describe(name)] == []


# The same batches as without a feed


def test_one_policy_in_waves_has_the_batches_of_collect_batch() -> None:
    def score(prompt: Any, completion: str) -> float:
        number, _, index = completion.partition(".")
        if number == "5":
            raise ValueError
        return 1.0 if int(number) % 3 == 0 else float(index)

    def make() -> Runner:
        counts: Counter[str] = Counter()

        def answer(request: Any) -> Any:
            number = text_of(request.tokens)[:-1]
            counts[number] += 1
            return said(f"{number}.{counts[number] - 1}", "length" if number == "4" else "stop")

        reward: Any = FakeReward(score)
        config = RolloutConfig(
            prompts_per_step=3, samples_per_prompt=2, dynamic_sampling=True, truncated="mask"
        )
        return Runner.single(
            ScriptedEngine(answer), renderer(), SingleTurn(reward), reward, config,
            policy="policy", run_seed=0,
        )  # fmt: skip

    async def pulled() -> list[Any]:
        runner, stream, batches = make(), FakeStream(20), []
        while not batches or not batches[-1].is_exhausted:
            batches.append(await collect_batch(stream, runner, step=len(batches) + 1))
        return batches

    async def fed() -> list[Any]:
        stream: Any = FakeStream(20)
        stream.num_left = None
        buffer = Buffer("policy", batch=3, max_staleness=0)
        feed = Feed(stream, make(), {"policy": buffer}, wave=3, mode="wave")
        tap, batches = FromFeed(feed, "policy"), []
        producer = asyncio.create_task(feed.run())
        while not batches or not batches[-1].is_exhausted:
            batches.append(await tap.collect(len(batches) + 1))
            if batches[-1].groups:
                tap.learned()
                tap.published(len(batches))
        await producer
        return batches

    own = {
        "rollout/staleness", "rollout/staleness_max", "rollout/buffer_groups",
        "rollout/discarded_groups", "rollout/refill_waves", "rollout/staleness_share/0",
        "rollout/mixed_versions", "rollout/unknown_versions", "rollout/interruptions",
    }  # fmt: skip
    one, two = run_virtual(pulled, shuffle=False), run_virtual(fed, shuffle=False)
    assert len(one) == len(two) > 3
    for left, right in zip(one, two, strict=True):
        assert repr(left.groups) == repr(right.groups)
        assert repr(left.dropped) == repr(right.dropped)
        values = [batch.metrics.values() for batch in (left, right)]
        assert {k: v for k, v in values[0].items() if k not in own} == {
            k: v for k, v in values[1].items() if k not in own
        }


# Groups of several policies


def test_a_group_may_be_dropped_for_one_policy_and_kept_for_another() -> None:
    def rewards(ordinal: int, policy: str) -> list[float | None]:
        if policy == "b" and ordinal == 3:
            return []
        return [1.0, 1.0] if policy == "b" and ordinal % 2 == 0 else [0.0, 1.0]

    runner = FakeRunner(["a", "b"], rewards=rewards, dynamic_sampling=True)
    paces = {"a": Pace(batch=2), "b": Pace(batch=2)}
    world = World(paces, runner, stream=make_stream(8), mode="wave")
    run_virtual(world.train, check=world.check)
    assert world.batches == {"a": [[0, 1], [2, 3], [4, 5], [6, 7]], "b": [[1, 5], [7]]}
    assert sum(v["rollout/dropped_groups/zero_variance"] for v in world.values["b"]) == 5


def test_a_group_in_which_a_policy_had_no_part_is_dropped_for_it() -> None:
    def rewards(ordinal: int, policy: str) -> list[float | None]:
        return [] if policy == "b" and ordinal % 2 else [0.0, 1.0]

    runner = FakeRunner(["a", "b"], rewards=rewards)
    world = World(
        {"a": Pace(batch=2), "b": Pace(batch=2)}, runner, stream=make_stream(8), mode="wave"
    )
    run_virtual(world.train, check=world.check)
    assert world.batches["b"] == [[0, 2], [4, 6]]
    assert world.books.told["b", "absent"] == 3


class TruncatingRunner(FakeRunner):
    async def collect(self, draws: Sequence[Draw], *, step: int) -> list[Group]:
        groups = await super().collect(draws, step=step)
        for sample in (sample for group in groups for sample in group.samples()):
            sample.status = Status.TRUNCATED
        return groups


def test_masking_truncated_answers_leaves_the_partners_groups_alone() -> None:
    runner = TruncatingRunner(["a", "b"], truncated="mask")
    world = World({"a": Pace(batch=1), "b": Pace(batch=1)}, runner, mode="wave")

    def trained(batch: RolloutBatch) -> set[str]:
        samples = (sample for group in batch.groups for sample in group.samples())
        return {sample.policy for sample in samples if sample.num_trained_tokens}

    async def look() -> None:
        one, again, other = [await world.taps[name].collect(1) for name in ("a", "a", "b")]
        assert (trained(one), trained(again), trained(other)) == ({"b"}, {"b"}, {"a"})
        assert one.metrics.values() == again.metrics.values()
        assert one.metrics.values()["rollout/answer_tokens"] == 2
        state = world.feed.state()["groups"]["0"]
        assert {s["mask"] for e in state["episodes"] for s in e["samples"]} == {"0 1 1"}

    while_feeding(world, look)


# Checkpoints and the driver's side


def test_a_state_of_other_policies_or_damaged_is_refused() -> None:
    state = world_of().feed.state()
    other = World({"a": Pace()}, FakeRunner(["a"]))
    with pytest.raises(ResumeMismatchError, match="buffers of policy, the run has a"):
        other.feed.restore(state, {"a": 0})
    same = world_of()
    for damage in ({"version": 9}, {"buffers": None}, {"stream": None}, {"groups": 1}):
        with pytest.raises(CheckpointError):
            same.feed.restore({**state, **damage}, {"policy": 0})
    with pytest.raises(CheckpointError, match="damaged"):
        same.feed.restore({**state, "buffers": {"policy": None}}, {"policy": 0})
    same.feed.restore(state, {"policy": 0})


class HeldEngine(ScriptedEngine):
    """Answers the first draw, and leaves the answers of others with some tokens made."""

    async def generate(self, request: Request) -> Completion:
        if request.group == "policy/0":
            return await super().generate(request)
        assert request.progress is not None
        request.progress.num_tokens += 5
        await asyncio.Event().wait()
        raise AssertionError


def test_tokens_of_draws_under_way_at_a_save_are_told_as_lost_once() -> None:
    def feed_of(engine: ScriptedEngine) -> Feed:
        reward: Any = FakeReward(lambda prompt, completion: float(len(completion)))
        config = RolloutConfig(prompts_per_step=1, samples_per_prompt=2)
        runner = Runner.single(
            engine, renderer(), SingleTurn(reward), reward, config, policy="policy", run_seed=0
        )
        buffer = Buffer("policy", batch=1, max_staleness=1)
        return Feed(make_stream(4), runner, {"policy": buffer}, wave=1, mode="continuous")

    async def interrupted() -> dict[str, Any]:
        feed = feed_of(HeldEngine(lambda _: said("12")))
        producer = asyncio.create_task(feed.run())
        await feed.take("policy")
        state = json.loads(json.dumps(feed.state()))
        producer.cancel()
        await asyncio.wait({producer})
        return state

    async def resumed(state: dict[str, Any]) -> list[float]:
        feed = feed_of(ScriptedEngine(lambda _: said("12")))
        feed.restore(state, {"policy": 0})
        assert feed.lost_tokens("policy") == 10
        producer = asyncio.create_task(feed.run())
        told = [(await feed.take("policy")).metrics.values() for _ in range(2)]
        producer.cancel()
        await asyncio.wait({producer})
        return [values.get("rollout/lost_tokens", 0.0) for values in told]

    state = run_virtual(interrupted)
    assert state["tokens_under_way"] == {"policy": 10}
    assert run_virtual(lambda: resumed(state)) == [10, 0]


def test_epochs_and_the_end_are_those_of_the_policy_not_of_sampling() -> None:
    world = world_of(batch=2, max_staleness=3, size=4)
    world.stream._num_epochs = 2
    tap = world.taps["policy"]

    async def look() -> list[tuple[int, bool]]:
        await asyncio.sleep(5)
        found = [(tap.epoch, tap.is_exhausted)]
        for step in range(1, 5):
            await tap.collect(step)
            found.append((tap.epoch, tap.is_exhausted))
            tap.learned()
            tap.published(step)
        return found

    assert while_feeding(world, look) == [(0, False), (0, False), (1, False), (1, False), (2, True)]


def test_a_tap_is_asked_step_by_step() -> None:
    world = world_of()
    with pytest.raises(RuntimeError, match="groups of step 2, but has told of step 0"):
        run_virtual(lambda: world.taps["policy"].collect(2))


def test_a_feed_nobody_started_is_waited_for() -> None:
    world = world_of()
    with pytest.raises(DeadlockError):
        run_virtual(lambda: world.taps["policy"].collect(1))
