"""Feeds over fakes, for tests: a runner that takes virtual time, and the clocks of policies."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivers.virtual_time import run_virtual

from paceline.data.buffer import Buffer
from paceline.data.prompts import prompts_from_rows
from paceline.data.stream import PromptStream
from paceline.data.tickets import Event
from paceline.drivers.feeding import FromFeed
from paceline.rollout.feed import Feed
from paceline.rollout.settings import RolloutConfig
from paceline.rollout.straggler import Straggler
from paceline.types import Draw, Episode, Group, Prompt, Sample, Status

Rewards = Callable[[int, str], Sequence[float | None]]
"""(ordinal, policy) -> the reward of each episode; None: it failed."""


def make_stream(size: int = 1000, *, num_epochs: int | None = 1) -> PromptStream:
    prompts = [Prompt(id=f"p{i}", text=f"{i}=") for i in range(size)]
    return PromptStream([prompts_from_rows(prompts, "a")], seed=0, num_epochs=num_epochs)


def make_group(draw: Draw, policies: Iterable[str], rewards: Rewards, version: int = 0) -> Group:
    rewards_by_policy = {policy: rewards(draw.ordinal, policy) for policy in policies}
    count = max(map(len, rewards_by_policy.values()))
    episodes = [
        Episode(
            draw.prompt.id,
            i,
            [
                make_sample(draw, policy, i, found[i], version)
                for policy, found in rewards_by_policy.items()
                if i < len(found)
            ],
        )
        for i in range(count)
    ]
    return Group(draw.prompt, episodes, draw.ordinal)


def make_sample(
    draw: Draw, policy: str, episode: int, reward: float | None, version: int
) -> Sample:
    has_failed = reward is None
    return Sample(
        policy, draw.prompt.id, episode, [3, 4, draw.ordinal % 7], [False, True, True],
        [0.0, -0.5, -0.25], [-1, version, version],
        Status.UNSCORED if has_failed else Status.COMPLETED, role=policy, reward=reward,
        cause="reward/timeout" if has_failed else None,
    )  # fmt: skip


def varied(ordinal: int, policy: str) -> Sequence[float | None]:
    return (0.0, 1.0)


@dataclass
class FakeReward:
    on_failure: Any = "drop_sample"


class FakeRunner:
    """Takes `duration(ordinal)` of virtual time for a group; raises what `failing` holds for it."""

    def __init__(
        self,
        policies: Iterable[str] = ("policy",),
        *,
        duration: Callable[[int], float] = lambda ordinal: 1.0,
        rewards: Rewards = varied,
        on_failure: str = "drop_sample",
        version: Callable[[], int] = lambda: 0,
        **config: Any,
    ) -> None:
        self.policies = list(policies)
        self.policy = self.policies[0]
        self.config = RolloutConfig(samples_per_prompt=2, **config)
        self.reward = FakeReward(on_failure)
        self.failing: dict[int, BaseException] = {}
        self.running: set[int] = set()
        self.calls: list[list[int]] = []
        self.cut: list[int] = []
        self._duration = duration
        self._rewards = rewards
        self._version = version
        self._cut_short = asyncio.Event()

    async def collect(self, draws: Sequence[Draw], *, step: int) -> list[Group]:
        ordinals = [draw.ordinal for draw in draws]
        self.calls.append(ordinals)
        version = self._version()
        self.running |= set(ordinals)
        try:
            for ordinal in ordinals:
                if ordinal in self.failing:
                    await asyncio.sleep(self._duration(ordinal) / 2)
                    raise self.failing[ordinal]
            await self._wait(max(map(self._duration, ordinals)), ordinals)
        finally:
            self.running -= set(ordinals)
        return [make_group(draw, self.policies, self._rewards, version) for draw in draws]

    async def _wait(self, seconds: float, ordinals: list[int]) -> None:
        until = asyncio.get_running_loop().time() + seconds
        while not set(ordinals) & set(self.cut):
            try:
                async with asyncio.timeout_at(until):
                    await self._cut_short.wait()
            except TimeoutError:
                return

    def cut_short(self, draw: Draw) -> bool:
        self.cut.append(draw.ordinal)
        self._cut_short.set()
        self._cut_short.clear()
        return draw.ordinal in self.running


@dataclass
class Pace:
    """How one policy trains."""

    batch: int = 4
    max_staleness: int = 0
    on_full: Any = "wait"
    publish_every: int = 1
    learn_s: Callable[[], float] = lambda: 1.0
    publish_s: Callable[[], float] = lambda: 0.0


@dataclass
class Books:
    """What happened to every draw, kept beside the system under test."""

    admitted: dict[tuple[str, int], int] = field(default_factory=dict)
    """(policy, ordinal) -> step that was published then."""
    trained: dict[str, list[int]] = field(default_factory=dict)
    dropped: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    staleness: dict[str, list[int]] = field(default_factory=dict)
    told: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(policy, reason) -> dropped draws that the metrics of batches told of."""

    def record(self, event: Event) -> None:
        key = (event.policy, event.ordinal)
        if event.kind == "running":
            self.admitted[key] = event.step
        elif event.kind == "trained":
            self.trained.setdefault(event.policy, []).append(event.ordinal)
            stale = event.step - 1 - self.admitted[key]
            self.staleness.setdefault(event.policy, []).append(stale)
        elif event.kind == "dropped":
            self.dropped[(*key, event.reason)] += 1


class World:
    """A feed, its buffers and the clocks of the policies behind it."""

    def __init__(
        self,
        paces: Mapping[str, Pace],
        runner: FakeRunner,
        *,
        stream: PromptStream | None = None,
        mode: Any = "continuous",
        books: Books | None = None,
        straggler: Straggler | None = None,
        max_in_flight: int | None = None,
    ) -> None:
        self.paces = dict(paces)
        self.runner = runner
        self.stream = stream or make_stream()
        self.books = books or Books()
        self.buffers = {
            name: Buffer(
                name,
                batch=pace.batch,
                max_staleness=pace.max_staleness,
                on_full=pace.on_full,
                record=self.books.record,
            )
            for name, pace in paces.items()
        }
        self.feed = Feed(
            self.stream, runner, self.buffers, wave=max(p.batch for p in paces.values()),
            mode=mode, straggler=straggler, max_in_flight=max_in_flight,
        )  # fmt: skip
        self.taps = {name: FromFeed(self.feed, name) for name in paces}
        self.batches: dict[str, list[list[int]]] = {name: [] for name in paces}
        self.values: dict[str, list[dict[str, float]]] = {name: [] for name in paces}
        self.told_last: Counter[tuple[str, str]] = Counter()

    @property
    def steps(self) -> dict[str, int]:
        return {name: buffer.trained_step for name, buffer in self.buffers.items()}

    async def clock(self, name: str, num_steps: int | None = None) -> None:
        """Train until the data, or the number of steps, is at its end."""
        pace, tap = self.paces[name], self.taps[name]
        while num_steps is None or self.steps[name] < num_steps:
            step = self.steps[name] + 1
            batch = await tap.collect(step)
            values = batch.metrics.values()
            if batch.groups:
                await asyncio.sleep(pace.learn_s())
                tap.learned()
                self.batches[name].append([group.draw for group in batch.groups])
            self.values[name].append(values)
            # A last step without groups is never learned: a restart tells of it again.
            told = self.books.told if batch.groups else self.told_last
            for key, value in values.items():
                if key.startswith("rollout/dropped_groups/"):
                    told[name, key.rpartition("/")[2]] += int(value)
            if not batch.groups:
                return
            if step % pace.publish_every == 0:
                await asyncio.sleep(pace.publish_s())
                tap.published(step)

    async def train(self, num_steps: int | None = None) -> None:
        """Feed and clocks until the clocks have ended."""
        producer = asyncio.create_task(self.feed.run())
        try:
            await asyncio.gather(*(self.clock(name, num_steps) for name in self.paces))
        finally:
            producer.cancel()
            await asyncio.wait({producer})

    def check(self) -> None:
        """What holds at every moment."""
        in_flight = {draw.ordinal for draw in self.feed.in_flight}
        for name, buffer in self.buffers.items():
            held = buffer.num_taken + buffer.num_ready
            slots = (buffer.max_staleness + buffer.published_step + 1) * buffer.batch
            if buffer.on_full == "wait":
                used = buffer.trained_step * buffer.batch + held + buffer.num_running
                assert used <= slots, f"{name}: {used} of {slots} slots"
            else:
                assert buffer.num_ready <= (buffer.max_staleness + 1) * buffer.batch
            assert buffer.num_running == len(in_flight), name

    def saved(self) -> tuple[dict[str, Any], dict[str, int]]:
        return json.loads(json.dumps(self.feed.state(), allow_nan=False)), self.steps


def random_pace(rng: random.Random, *, on_full: str = "wait") -> Pace:
    publish_every = rng.choice([1, 1, 1, 2, 3])
    return Pace(
        batch=rng.randint(1, 5),
        max_staleness=publish_every - 1 + rng.randint(0, 3),
        on_full=on_full,
        publish_every=publish_every,
        learn_s=lambda: rng.choice([0.0, 0.1, 1.0, 8.0]),
        publish_s=lambda: rng.choice([0.0, 0.0, 0.5]),
    )


def world_of(
    *, runner: FakeRunner | None = None, mode: str = "continuous", size: int = 1000, **options: Any
) -> World:
    """One policy; options of its pace, or of the world."""
    of_world = {k: options.pop(k) for k in ("straggler", "max_in_flight") if k in options}
    pace = Pace(**{"batch": 2, **options})
    stream = make_stream(size)
    return World({"policy": pace}, runner or FakeRunner(), stream=stream, mode=mode, **of_world)


def while_feeding(world: World, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """The result of the work, with the feed beside it."""

    async def run() -> Any:
        producer = asyncio.create_task(world.feed.run())
        try:
            return await work()
        finally:
            producer.cancel()
            await asyncio.wait({producer})
            assert len(asyncio.all_tasks()) == 1

    return run_virtual(run, check=world.check)
