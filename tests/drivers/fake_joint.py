"""A run of several policies made of fakes, in a real folder; every call is written into one log."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crashing import FastFiles
from drivers.fake_run import Log, LoggedEngine, LoggedTrainer
from drivers.virtual_time import run_virtual
from feeds import FakeRunner, make_stream

from paceline.algorithms import ALGORITHMS
from paceline.build.policies import restore_policy
from paceline.checkpoint import CheckpointStore
from paceline.checkpoint_settings import CheckpointConfig
from paceline.data.buffer import Buffer
from paceline.drivers import multi
from paceline.drivers.board import Board
from paceline.drivers.feeding import FromFeed
from paceline.drivers.gate import Gate
from paceline.drivers.joint import Joint, Lead
from paceline.drivers.memory import KeepBoth
from paceline.drivers.run import Cadence, Run
from paceline.drivers.saving import Saves
from paceline.drivers.schedule import SaveRequest
from paceline.drivers.supply import Pull
from paceline.evals import EvalDispatcher, EvalResult
from paceline.evals.estimates import Estimate
from paceline.evals_settings import EvalsConfig
from paceline.observe.recorder import Recorder
from paceline.policy import Policy
from paceline.rollout.batch import RolloutBatch
from paceline.rollout.feed import Feed

FAST = FastFiles()


async def _at_once(work: Callable[[], object]) -> None:
    """There are no threads in virtual time."""
    work()


class PolicyLog(list[str]):
    """Writes into the log of the run, with the policy's name before each entry."""

    def __init__(self, name: str, log: Log) -> None:
        super().__init__()
        self.name, self.log = name, log

    def append(self, entry: str) -> None:
        self.log.append(f"{self.name}-{entry}")


class SlowTrainer(LoggedTrainer):
    """Takes `learn_s` for an update, and notes whether anybody could move while it is saved."""

    learn_s = 1.0
    save_s = 0.0
    write_s = 5.0
    """In the background."""
    is_held: Callable[[], bool] | None = None

    async def forward_backward(self, batch: Any) -> Any:
        await asyncio.sleep(self.learn_s)
        return await super().forward_backward(batch)

    async def save(self, path: Path, later: Any = None) -> None:
        assert self.is_held is None or self.is_held()
        await asyncio.sleep(self.save_s)
        writes: list[Any] = []
        await super().save(path, None if later is None else writes.append)
        for write in writes:
            later(lambda write=write: self._write(write))

    async def _write(self, write: Any) -> None:
        await asyncio.sleep(self.write_s)
        self.calls.append("write")
        await write()


@dataclass
class Setting:
    """One policy. Without `num_prompts` of its own it shares those of the run."""

    batch: int = 2
    num_prompts: int | None = None
    max_staleness: int = 0
    publish_every: int = 1
    on_full: Any = "wait"
    max_lead: int | None = None
    learn_s: float = 1.0
    sample_s: float = 1.0


@dataclass
class World:
    """What a test looks at."""

    joint: Joint
    log: Log
    runs: dict[str, Run]
    feeds: dict[str, Feed] = field(default_factory=dict)
    evals: dict[int, dict[str, int]] = field(default_factory=dict)
    """Step -> the versions that were measured."""
    on_eval: Callable[[int], Any] | None = None

    def drive(self) -> None:
        async def body() -> None:
            store = self.joint.leader.store
            found = store.newest().checkpoint
            if found is not None:
                for run in self.runs.values():
                    await restore_policy(run.policy, found, found.state())
            await multi.drive(self.joint)

        try:
            run_virtual(body, shuffle=False, max_callbacks=100_000)
        finally:
            self.joint.leader.store.close()

    def weights(self) -> dict[str, int]:
        return {name: run.policy.trainer.weight for name, run in self.runs.items()}  # type: ignore[attr-defined]

    def steps(self) -> dict[str, int]:
        return self.joint.board.trained_steps()


def make_world(
    folder: Path,
    settings: Mapping[str, Setting],
    *,
    num_prompts: int = 6,
    num_steps: int = 4,
    num_epochs: int | None = None,
    save_every: int | str = 2,
    eval_every: int | None = 2,
    eval_first: bool = False,
    debug_exit_after: int | None = None,
    is_deterministic: bool = False,
    keep_last: int = 5,
    background: bool = False,
) -> World:
    """The first policy leads. Resumed if there is a checkpoint in the folder."""
    log, (leader, *_) = Log(), settings
    store = CheckpointStore(folder / "checkpoints", CheckpointConfig(keep_last=keep_last), FAST)
    store.prepare()
    checkpoint = store.newest().checkpoint
    state = checkpoint.state() if checkpoint else None
    steps = {n: state.policies[n].step if state else 0 for n in settings}
    recorder = Recorder(folder, leader=leader, files=FAST)
    recorder.start(steps if state else {}, state.metrics if state else None)
    board = Board(settings, leader)
    world = World(None, log, {})  # type: ignore[arg-type]
    supplies = _supplies(world, settings, steps, num_prompts, num_epochs)
    if checkpoint is not None:
        data = checkpoint.read_json("data.json")
        for name, supply in supplies.items():
            if isinstance(supply, Pull):
                supply.stream.restore(data[name])
        for name, feed in world.feeds.items():
            feed.restore(data[name], {n: steps[n] for n in feed.buffers})

    async def evaluate(step: int, version: int, snapshot: Any) -> list[EvalResult]:
        log.append(f"eval {step} version {version}")
        versions = {name: run.policy.engine.version for name, run in world.runs.items()}  # type: ignore[attr-defined]
        await asyncio.sleep(0.5)
        if world.on_eval is not None:
            await world.on_eval(step)
        world.evals[step] = versions
        reward = Estimate(step / 10, None, None, None)
        return [EvalResult("held", step, version, reward=reward, num_prompts=1, num_samples=1)]

    def data_state() -> Any:
        pulls = {n: s.state() for n, s in supplies.items() if isinstance(s, Pull)}
        return pulls | {name: feed.state() for name, feed in world.feeds.items()}

    for name, setting in settings.items():
        trainer = SlowTrainer(PolicyLog(name, log))
        trainer.learn_s = setting.learn_s
        engine = LoggedEngine(PolicyLog(name, log))
        is_leader = name == leader
        world.runs[name] = Run(
            policy=Policy(name, ALGORITHMS["grpo"](), engine, trainer, "shared"),
            supply=supplies[name],
            memory=KeepBoth(),
            board=board,
            recorder=recorder,
            store=store,
            save_request=SaveRequest(folder / "save" if is_leader else None),
            evals=EvalDispatcher(EvalsConfig(timeout_s=60.0), evaluate),
            cadence=Cadence(
                num_steps if is_leader else sys.maxsize,
                save_every if is_leader else "never",  # type: ignore[arg-type]
                eval_every if is_leader else None,
                eval_first and is_leader,
                counts_epochs=num_epochs is not None and is_leader,
                debug_exit_after=debug_exit_after if is_leader else None,
                publish_every=setting.publish_every,
            ),
            seed=0,
            fingerprint={"seed": 0},
            data_state=data_state,
            saves=Saves(in_background=background and is_leader, call=_at_once),
            step=steps[name],
            saved_step=steps[name] if state else None,
            epoch_ended=bool(state and state.epoch_ended and is_leader),
        )
    world.runs[leader].others = [run for name, run in world.runs.items() if name != leader]
    limits = {n: s.max_lead for n, s in settings.items() if n != leader and s.max_lead is not None}
    if is_deterministic:
        own = [n for n, s in settings.items() if n != leader and s.num_prompts is not None]
        limits = dict.fromkeys(own, 0) | limits
    gate = Gate(list(settings), deadline_s=500.0, report=board.report, clock=_now)
    world.joint = Joint(
        leader=world.runs[leader],
        board=board,
        gate=gate,
        producers={f"feed {name}": feed.run for name, feed in world.feeds.items()},
        is_deterministic=is_deterministic,
        quiet=_loud,
        lead=Lead(limits),
    )
    for run in world.runs.values():
        if len(settings) > 1:
            run.policy.trainer.is_held = lambda: gate.is_held  # type: ignore[attr-defined]
    return world


def _supplies(
    world: World,
    settings: Mapping[str, Setting],
    steps: Mapping[str, int],
    num_prompts: int,
    num_epochs: int | None,
) -> dict[str, Any]:
    supplies: dict[str, Any] = {}
    shared = {name: s for name, s in settings.items() if s.num_prompts is None}
    own = {name: {name: s} for name, s in settings.items() if s.num_prompts is not None}
    for feed, members in (({"shared": shared} if shared else {}) | own).items():
        first = next(iter(members.values()))
        stream = make_stream(first.num_prompts or num_prompts, num_epochs=num_epochs)
        runner = FakeRunner(members, duration=lambda ordinal, s=first.sample_s: s)
        if len(members) == 1 and first.max_staleness == 0:
            (name,) = members
            supplies[name] = Pull(stream, _pull(world, name, stream, runner, first.batch))
            continue
        buffers = {
            name: Buffer(
                name, batch=s.batch, max_staleness=s.max_staleness, on_full=s.on_full,
                step=steps[name],
            )
            for name, s in members.items()
        }  # fmt: skip
        ahead = any(s.max_staleness or s.on_full == "drop_oldest" for s in members.values())
        mode: Any = "continuous" if ahead else "wave"
        world.feeds[feed] = Feed(stream, runner, buffers, wave=first.batch, mode=mode)
        supplies |= {name: FromFeed(world.feeds[feed], name) for name in members}
    return supplies


def _pull(world: World, name: str, stream: Any, runner: FakeRunner, batch: int) -> Any:
    async def take(step: int) -> RolloutBatch:
        world.log.append(f"{name}-collect {step}")
        draws = stream.take(batch)
        return RolloutBatch(await runner.collect(draws, step=step) if draws else [])

    return take


@asynccontextmanager
async def _loud() -> Any:
    """Nothing has to come to rest for an eval."""
    yield


def _now() -> float:
    return asyncio.get_running_loop().time()
