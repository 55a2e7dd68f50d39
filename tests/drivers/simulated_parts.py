"""Engines, trainers, a disk and a runner that take virtual time and may fail: for simulations.

All of them belong to a `Place`, which knows who is doing what, and what is to go wrong.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline.evals import EvalResult
from paceline.evals.estimates import Estimate
from paceline.observe.metrics import Metrics
from paceline.rollout.batch import RolloutBatch
from paceline.rollout.settings import RolloutConfig
from paceline.types import Draw, Episode, Group, Sample, Status
from paceline.weights.base import WeightPlan
from paceline.weights.publish import publish

CONFIG = RolloutConfig(samples_per_prompt=2, dynamic_sampling=True).model_copy(
    update={"max_refills": 10**6}
)
SECONDS = (0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 7.0)


class InjectedError(Exception):
    """What a part raises that is to fail."""


@dataclass
class Place:
    """What all parts of one life of a run have in common."""

    rng: random.Random
    failing: dict[str, int] = field(default_factory=dict)
    """Part -> the number of its call that fails, from 1."""
    is_hanging: bool = False
    """An eval that is to fail never ends instead."""
    changing: set[str] = field(default_factory=set)
    """Policies whose weights change just now."""
    publishing: set[str] = field(default_factory=set)
    num_calls: Counter[str] = field(default_factory=Counter)
    sampling: int = 0
    """Groups that are being sampled."""
    is_held: Any = None
    """Whether the gate is held."""
    evals: dict[int, dict[str, int]] = field(default_factory=dict)
    """Step of the leader -> what every engine served while it was measured."""
    engines: dict[str, SimEngine] = field(default_factory=dict)
    quiet_evals: bool = False
    has_begun: bool = False
    """The clocks go: what came before them is over."""
    violations: list[str] = field(default_factory=list)

    def expect(self, holds: bool, what: str) -> None:
        """Where an error would be taken for one of the part itself."""
        if not holds:
            self.violations.append(what)

    async def work(self, part: str) -> None:
        """Take a while, and fail if it is time for that."""
        seconds = self.rng.choice(SECONDS)
        if seconds:
            await asyncio.sleep(seconds)
        self.num_calls[part] += 1
        if self.failing.get(part) == self.num_calls[part]:
            raise InjectedError(part)

    async def beside(self, work: Any) -> None:
        """What a thread would do."""
        await asyncio.sleep(self.rng.choice(SECONDS))
        work()


class SimEngine:
    """Serves requests of the version it has; a pause waits for those under way."""

    def __init__(self, place: Place, policy: str) -> None:
        self.place, self.policy = place, policy
        self.version = 0
        self.is_paused = self.is_closed = False
        self.num_running = 0
        self._moved = asyncio.Event()

    async def request(self) -> int:
        """Make an answer; returns the version that it is made of."""
        while self.is_paused:
            await self._moved.wait()
        self.num_running += 1
        version = self.version
        try:
            await self.place.work(f"engine {self.policy}")
        finally:
            self.num_running -= 1
            self._move()
        assert self.version == version, "the weights changed under an answer"
        return version

    def _move(self) -> None:
        self._moved.set()
        self._moved.clear()

    async def pause(self, mode: str) -> None:
        self.is_paused = True
        while self.num_running:
            await self._moved.wait()

    async def receive(self, plan: WeightPlan) -> None:
        assert self.is_paused
        await self.place.work(f"receive {self.policy}")
        assert plan.version >= self.version, "an engine went back"
        self.version = plan.version

    async def resume(self) -> None:
        self.is_paused = False
        self._move()

    async def aclose(self) -> None:
        self.is_closed, self.is_paused = True, False


class SimTrainer:
    """Its weights are what it has learned from: the draws of every step, with their versions."""

    def __init__(self, place: Place, policy: str, disk: SimDisk) -> None:
        self.place, self.policy, self.disk = place, policy, disk
        self.batches: list[list[list[int]]] = []
        """Per step: [ordinal of the draw, version that sampled it]."""

    @property
    def version(self) -> int:
        return len(self.batches)

    async def send(self, plan: WeightPlan) -> WeightPlan:
        await self.place.work(f"send {self.policy}")
        return plan

    async def save(self, path: Path, later: Any = None) -> None:
        assert not self.place.changing, f"{self.place.changing} learn during a save"
        await self.place.work(f"save {self.policy}")
        copied = json.dumps(self.batches)

        async def write() -> None:
            await self.place.work(f"write {self.policy}")
            self.disk.write(str(path), copied)

        if later is None:
            self.disk.write(str(path), copied)
        else:
            later(write)

    def load(self, content: str) -> None:
        self.batches = json.loads(content)


class SimPolicy:
    """What `steps` wants of a policy."""

    def __init__(self, place: Place, name: str, disk: SimDisk, max_staleness: int) -> None:
        self.place, self.name, self.max_staleness = place, name, max_staleness
        self.engine, self.trainer = SimEngine(place, name), SimTrainer(place, name, disk)
        self.version = -1
        self.critic, self.critic_only_steps, self.baselines = None, 0, {}

    async def learn(self, groups: Sequence[Group], *, critic_only: bool) -> tuple[Any, Metrics]:
        batch = [[group.draw, self._version_of(group)] for group in groups]
        for _, made_by in batch:
            assert 0 <= self.trainer.version - made_by <= self.max_staleness, "too stale"
        self.place.changing.add(self.name)
        try:
            await self.place.work(f"learn {self.name}")
            self.trainer.batches.append(batch)
        finally:
            self.place.changing.discard(self.name)
        metrics = Metrics()
        metrics.mean("train/loss", float(sum(draw for draw, _ in batch)))
        return SimpleNamespace(advantages=[]), metrics

    def _version_of(self, group: Group) -> int:
        return next(sample.versions[1] for sample in group.samples(self.name))

    async def publish(self) -> None:
        self.place.publishing.add(self.name)
        plan = WeightPlan(self.name, self.trainer.version, "copy")
        sent = await publish(self.trainer, {"engine": self.engine}, plan)
        self.version = sent.version
        self.place.publishing.discard(self.name)


@dataclass
class SimRunner:
    """Asks the engines of all policies in turn. lost: draws that teach a policy nothing."""

    place: Place
    name: str
    engines: dict[str, SimEngine]
    lost: set[tuple[str, int]]
    config: Any = CONFIG
    reward: Any = None

    async def collect(self, draws: Sequence[Draw], *, step: int) -> list[Group]:
        self.place.sampling += len(draws)
        try:
            await self.place.work(f"runner {self.name}")
            versions = {name: await engine.request() for name, engine in self.engines.items()}
        finally:
            self.place.sampling -= len(draws)
        return [self._group(draw, versions) for draw in draws]

    def _group(self, draw: Draw, versions: dict[str, int]) -> Group:
        episodes = [
            Episode(
                draw.prompt.id,
                i,
                [
                    Sample(
                        name, draw.prompt.id, i, [3, 4], [False, True], [0.0, -0.5], [-1, version],
                        Status.COMPLETED, role=name,
                        reward=0.0 if (name, draw.ordinal) in self.lost else float(i),
                    )
                    for name, version in versions.items()
                ],
            )
            for i in range(2)
        ]  # fmt: skip
        return Group(draw.prompt, episodes, draw.ordinal)

    async def pull(self, stream: Any, count: int) -> RolloutBatch:
        draws = stream.take(count)
        return RolloutBatch(await self.collect(draws, step=0) if draws else [])


@dataclass
class SimDisk:
    """Checkpoints by step, and a save that is not committed yet. A dead one takes no more."""

    place: Place
    saved: dict[int, dict[str, Any]] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)
    is_staging: bool = False
    is_dead: bool = False
    dies_at: int = 0
    """The process is gone after this commit."""
    awaited: set[int] = field(default_factory=set)
    on_commit: Any = None

    def begin(self, place: Place, on_commit: Any) -> None:
        """Another process; what the one before had not committed is gone."""
        self.place, self.on_commit = place, on_commit
        self.open, self.is_staging, self.is_dead, self.awaited = {}, False, False, set()

    def write(self, name: str, text: str) -> None:
        self.open[name] = text

    @contextmanager
    def staging(self, step: int) -> Iterator[Any]:
        assert not self.is_staging, "two saves at a time"
        self.is_staging = True
        try:
            yield SimStaged(step, self)
        finally:
            self.open, self.is_staging = {}, False

    def commit(self, staged: SimStaged) -> None:
        self.place.num_calls["commit"] += 1
        if self.place.failing.get("commit") == self.place.num_calls["commit"]:
            raise InjectedError("commit")
        if not self.is_dead:
            self.saved[staged.step] = {**self.open, "books": self.on_commit()}
            if self.place.num_calls["commit"] == self.dies_at:
                self.is_dead = True

    def await_score(self, step: int) -> None:
        self.awaited.add(step)

    def record(self, step: int, values: Any) -> None:
        self.awaited.discard(step)

    def forgo(self, step: int) -> None:
        self.awaited.discard(step)

    def newest(self) -> dict[str, Any] | None:
        return self.saved[max(self.saved)] if self.saved else None


@dataclass
class SimStaged:
    step: int
    disk: SimDisk

    def policy_folder(self, name: str) -> Path:
        return Path(name)

    def write(self, name: str, data: bytes) -> None:
        self.disk.write(name, data.decode())


@dataclass
class SimRequest:
    """A file that somebody touches."""

    is_touched: bool = False
    num_served: int = 0
    _is_claimed: bool = False
    _is_served: bool = False

    def claim(self) -> bool:
        if self._is_served:
            return self.is_touched
        self._is_claimed |= self.is_touched
        self.is_touched = False
        return self._is_claimed

    def serve(self) -> None:
        self.claim()
        self._is_served = True

    def acknowledge(self) -> None:
        self.num_served += self._is_claimed
        self._is_claimed = self._is_served = False


async def measure(place: Place, step: int, version: int) -> list[EvalResult]:
    """Evaluate; nobody's weights may move meanwhile, neither in trainers nor in engines."""
    before = {name: engine.version for name, engine in place.engines.items()}
    place.expect(version == step == before["a"], f"step {step} is measured at {before}")
    place.expect(step == 0 or place.is_held() or not place.has_begun, "measured in the open")
    place.expect(not place.changing, "learned during an eval")
    await asyncio.sleep(place.rng.choice(SECONDS))
    place.expect(not (place.quiet_evals and place.sampling), "sampled during an eval")
    place.num_calls["eval"] += 1
    if place.failing.get("eval") == place.num_calls["eval"]:
        if place.is_hanging:
            await asyncio.get_running_loop().create_future()
        raise InjectedError("eval")
    after = {name: engine.version for name, engine in place.engines.items()}
    place.expect(before == after, f"engines served {before}, then {after} during an eval")
    place.evals[step] = before
    reward = Estimate(float(step), None, None, None)
    return [EvalResult("held", step, step, reward=reward, num_prompts=1, num_samples=1)]
