"""Feeds, buffers and clocks under thousands of seeded schedules with kills, failures and cancels.

A failing seed is printed with the end of its schedule by `run_virtual`.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections import Counter
from typing import Any

import pytest
from drivers.virtual_time import run_virtual
from feeds import Books, FakeRunner, Pace, World, make_stream, random_pace

from paceline.types import Group

NUM_FAST, NUM_SLOW = 60, 1500
SLOW = (pytest.mark.slow, pytest.mark.timeout(900))
SEEDS = [
    pytest.param(range(NUM_FAST), id="few"),
    pytest.param(range(NUM_FAST, NUM_SLOW), id="many", marks=SLOW),
]


class KilledError(Exception):
    """The process is gone."""


class EngineDiedError(Exception):
    """What a runner raises."""


class Trial:
    """One run over all its restarts: random paces, saves, kills, failures, holds, cancels."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        rng = self.rng = random.Random(seed)
        self.mode = rng.choice(["wave", "continuous", "continuous"])
        self.paces = {"leader": random_pace(rng)}
        for name in ("second", "third")[: rng.randint(0, 2)]:
            self.paces[name] = random_pace(rng, on_full=rng.choice(["wait", "drop_oldest"]))
        self.num_prompts, self.num_epochs = rng.randint(1, 25), rng.randint(1, 2)
        self.durations = [rng.randint(1, 50) for _ in range(self.num_draws)]
        self.lost = {
            (name, ordinal): rng.choice(["failed", "zero_variance", "absent"])
            for name in self.paces
            for ordinal in range(self.num_draws)
            if rng.random() < 0.2
        }
        self.books = Books()
        self.snapshot: tuple[Any, Any, Books] | None = None
        self.befell: Counter[str] = Counter()

    @property
    def num_draws(self) -> int:
        return self.num_prompts * self.num_epochs

    def rewards(self, ordinal: int, policy: str) -> list[float | None]:
        reason = self.lost.get((policy, ordinal))
        if any(self.lost.get((name, ordinal)) == "failed" for name in self.paces):
            return [None, None]
        if reason == "absent" and len(self.paces) > 1:
            return []
        return [1.0, 1.0] if reason == "zero_variance" else [0.0, 1.0]

    def reason(self, policy: str, ordinal: int) -> str | None:
        if any(self.lost.get((name, ordinal)) == "failed" for name in self.paces):
            return "failed"
        if all(not self.rewards(ordinal, name) for name in self.paces):
            return "failed"
        rewards = self.rewards(ordinal, policy)
        # Without a sample of the policy all of its rewards are equal too.
        return "zero_variance" if len(set(rewards)) < 2 else None

    def world(self) -> World:
        runner = FakeRunner(
            self.paces,
            duration=lambda ordinal: self.durations[ordinal],
            rewards=self.rewards,
            dynamic_sampling=True,
            max_refills=1000,
        )
        runner.config = runner.config.model_copy(update={"max_refills": 1000})
        world = World(
            self.paces,
            runner,
            stream=make_stream(self.num_prompts, num_epochs=self.num_epochs),
            mode=self.mode,
            books=copy.deepcopy(self.snapshot[2]) if self.snapshot else Books(),
            max_in_flight=self.rng.choice([None, None, 3]),
        )
        world.feed._streaks._wave = 1000
        if self.snapshot:
            world.feed.restore(*self.snapshot[:2])
        return world

    def save(self, world: World) -> None:
        self.snapshot = (*world.saved(), copy.deepcopy(world.books))

    def life(self, schedule: int, *, is_last: bool) -> None:
        """From the last save until the end, or until something ends it."""
        world = self.world()
        self.save(world)
        try:
            run_virtual(
                lambda: self._live(world, is_last),
                seed=schedule,
                check=world.check,
                max_callbacks=100_000,
            )
        except KilledError:
            self.befell["ended early"] += 1
            return
        self.books = world.books
        self.told = world.books.told + world.told_last

    async def _live(self, world: World, is_last: bool) -> None:
        tasks = [asyncio.create_task(self._disturb(world, is_last)) for _ in range(2)]
        if not is_last and self.rng.random() < 0.3:
            self._break(world)
        try:
            training = asyncio.create_task(self._train(world))
            done, _ = await asyncio.wait({training, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {training}:
                task.result()
            if isinstance(training.exception(), EngineDiedError):
                raise KilledError
            await training
        finally:
            for task in (training, *tasks):
                task.cancel()
            await asyncio.wait({training, *tasks})
        assert not world.runner.running
        assert not world.feed.in_flight

    async def _train(self, world: World) -> None:
        """The clocks; the feed may be cancelled and started again under them."""
        self.producer = asyncio.create_task(world.feed.run())
        clocks = [asyncio.create_task(world.clock(name)) for name in self.paces]
        try:
            await asyncio.wait(clocks, return_when=asyncio.FIRST_EXCEPTION)
            if world.runner.failing and any(c.done() and c.exception() for c in clocks):
                await self._check_failure(world, clocks)
            for clock in clocks:
                await clock
        finally:
            for task in (*clocks, self.producer):
                task.cancel()
            await asyncio.wait({*clocks, self.producer})

    def _break(self, world: World) -> None:
        ordinal = self.rng.randrange(self.num_draws)
        world.runner.failing[ordinal] = EngineDiedError(f"draw {ordinal}")

    async def _check_failure(self, world: World, clocks: list[asyncio.Task[None]]) -> None:
        """Everybody has the original exception, nothing runs, and every draw is accounted for."""
        self.befell["failed"] += 1
        (original,) = world.runner.failing.values()
        await asyncio.wait([*clocks, self.producer])
        found = [task.exception() for task in (*clocks, self.producer)]
        assert all(e is original for e in found if e is not None), found
        assert self.producer.exception() is original
        assert not world.runner.running
        assert not world.feed.in_flight
        again = {draw.ordinal for draw in world.stream.take(10**6)}
        for name, buffer in world.buffers.items():
            assert buffer.num_running == 0
            used = {*world.books.trained.get(name, [])}
            used |= {o for policy, o, _ in world.books.dropped if policy == name}
            groups: dict[str, Any] = {}
            ready = {ordinal for ordinal, _, _ in buffer.state(groups)["ready"]}
            assert sorted([*again, *used, *ready]) == list(range(self.num_draws))

    async def _disturb(self, world: World, is_last: bool) -> None:
        """Saves at any time; kills; cancels of the feed; holds."""
        rng = self.rng
        while True:
            await asyncio.sleep(rng.choice([0, 0.5, 1, 5, 20, 60]) + 0.01)
            match rng.choice(["save", "save", "kill", "cancel", "hold"]):
                case "save":
                    self.save(world)
                case "kill" if not is_last:
                    raise KilledError
                case "cancel" if not self.producer.done():
                    self.producer.cancel()
                    await asyncio.wait({self.producer})
                    if self.producer.cancelled():
                        assert not world.runner.running
                        self.befell["cancelled"] += 1
                        self.producer = asyncio.create_task(world.feed.run())
                case "hold":
                    try:
                        async with asyncio.timeout(rng.choice([10, 1000])), world.feed.held():
                            assert not world.runner.running
                            calls = len(world.runner.calls)
                            await asyncio.sleep(rng.choice([0, 3]))
                            assert len(world.runner.calls) == calls
                            self.befell["held"] += 1
                    except TimeoutError:
                        pass
                    except EngineDiedError:
                        continue

    def verify(self) -> None:
        for name, pace in self.paces.items():
            trained = self.books.trained.get(name, [])
            dropped = {o: r for policy, o, r in self.books.dropped if policy == name}
            counts = [n for (policy, _, _), n in self.books.dropped.items() if policy == name]
            assert set(counts) <= {1}
            assert sorted([*trained, *dropped]) == list(range(self.num_draws)), "lost or doubled"
            expected = {o: r for o in range(self.num_draws) if (r := self.reason(name, o))}
            if pace.on_full == "wait":
                assert trained == sorted(trained), "not in the order of draws"
                assert dropped == expected
            else:
                assert {o: r for o, r in dropped.items() if r != "oldest"} == expected
            assert max(self.books.staleness.get(name, [0])) <= pace.max_staleness
            assert min(self.books.staleness.get(name, [0])) >= 0
            told = {r: n for (policy, r), n in self.told.items() if policy == name and n}
            assert told == Counter(dropped.values())


@pytest.mark.parametrize("seeds", SEEDS)
def test_nothing_is_lost_doubled_or_too_stale_over_any_number_of_restarts(seeds: range) -> None:
    befell: Counter[str] = Counter()
    for seed in seeds:
        trial = Trial(seed)
        try:
            num_lives = trial.rng.randint(1, 5)
            for life in range(num_lives):
                trial.life(seed * 10 + life, is_last=life == num_lives - 1)
            trial.verify()
            befell += trial.befell
        except BaseException as error:
            error.add_note(f"trial {seed}: {trial.mode}, {trial.paces}, {trial.num_draws} draws")
            raise
    for what in ("ended early", "failed", "cancelled", "held"):
        assert befell[what] > len(seeds) / 20, befell


@pytest.mark.parametrize("seeds", SEEDS)
def test_without_staleness_waves_are_the_same_under_every_schedule(seeds: range) -> None:
    """Batches, and the weights that their groups were sampled from, for two policies."""

    def run(seed: int) -> Any:
        rng = random.Random(seed)
        paces = {
            "leader": Pace(batch=3, learn_s=lambda: rng.random() * 9),
            "second": Pace(batch=5, learn_s=lambda: rng.random() * 3, publish_s=rng.random),
        }

        def rewards(ordinal: int, policy: str) -> list[float]:
            return [1.0, 1.0 * (ordinal % 3 == 0 and policy == "second")]

        worlds: list[World] = []

        def served() -> int:
            published = (b.published_step for b in worlds[0].buffers.values())
            return sum(step * 1000**i for i, step in enumerate(published))

        runner = FakeRunner(
            paces, duration=lambda ordinal: 1 + rng.random() * 50, rewards=rewards, version=served,
            dynamic_sampling=False,
        )  # fmt: skip
        world = World(paces, runner, stream=make_stream(40), mode="wave")
        worlds.append(world)
        sampled: list[Group] = []
        for buffer in world.buffers.values():
            deliver = buffer.deliver
            buffer.deliver = lambda o, g, deliver=deliver: (sampled.append(g), deliver(o, g))  # type: ignore[method-assign]
        run_virtual(world.train, seed=seed, check=world.check)
        versions = [(group.draw, next(group.samples()).versions) for group in sampled]
        return world.batches, world.values, versions, runner.calls

    first = run(0)
    for seed in seeds:
        assert run(seed) == first, seed
