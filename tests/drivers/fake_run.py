"""A run made of fakes, whose every call is written into one log in the order it happens."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.algorithms import ALGORITHMS
from paceline.build.policies import restore_policy
from paceline.checkpoint import CheckpointStore
from paceline.checkpoint_settings import CheckpointConfig
from paceline.data.prompts import PromptSet
from paceline.data.stream import PromptStream
from paceline.drivers import sync
from paceline.drivers.board import Board
from paceline.drivers.memory import MemoryConfig, make_memory_plan
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
from paceline.testing import FakeEngine, FakeTrainer
from paceline.types import Draw, Episode, Group, Prompt, Sample, Status

NUM_PROMPTS = 6
PROMPTS_PER_STEP = 2


class Log(list[str]):
    """What happened, in order."""

    def of(self, *words: str) -> list[str]:
        return [entry for entry in self if entry.split()[0] in words]


class LoggedEngine(FakeEngine):
    def __init__(self, log: Log) -> None:
        super().__init__()
        self.calls = log


class LoggedTrainer(FakeTrainer):
    def __init__(self, log: list[str], **settings: Any) -> None:
        super().__init__(**settings)
        self.calls = log


class CriticLog(list[str]):
    """Writes into the log of the run, with `critic-` before each entry."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def append(self, entry: str) -> None:
        self.log.append(f"critic-{entry}")


def make_group(draw: Draw) -> Group:
    """Two episodes, one right and one wrong."""
    episodes = [
        Episode(
            draw.prompt.id,
            i,
            [
                Sample(
                    policy="policy",
                    prompt_id=draw.prompt.id,
                    episode=i,
                    tokens=[3, 4, 1],
                    mask=[False, True, True],
                    logprobs=[0.0, -0.5, -0.25],
                    versions=[-1, 0, 0],
                    status=Status.COMPLETED,
                    reward=float(i),
                )
            ],
        )
        for i in range(2)
    ]
    return Group(draw.prompt, episodes, draw.ordinal)


def make_run(
    folder: Path,
    *,
    num_steps: int = 4,
    save_every: int | str = 2,
    eval_every: int | None = 2,
    eval_first: bool = True,
    debug_exit_after: int | None = None,
    num_epochs: int | None = None,
    memory: str = "none",
    checkpoint: dict[str, Any] | None = None,
    algorithm: str = "grpo",
    critic_only_steps: int = 0,
    updates_per_step: int = 1,
    epochs_per_step: int = 1,
    snapshots: Any = None,
    background: bool = False,
) -> tuple[Run, Log]:
    """A run in `folder`, resumed if there is a checkpoint; with a critic if it has kind ppo."""
    log = Log()
    engine, trainer = LoggedEngine(log), LoggedTrainer(log)
    critic = None
    if ALGORITHMS[algorithm]().critic is not None:
        critic = LoggedTrainer(CriticLog(log), head="values")
    prompts = tuple(Prompt(f"p{i}", text=str(i)) for i in range(NUM_PROMPTS))
    stream = PromptStream(
        [PromptSet("data", prompts, (), 0, "hash", None)], seed=0, num_epochs=num_epochs
    )

    async def collect(step: int) -> RolloutBatch:
        log.append(f"collect {step}")
        return RolloutBatch([make_group(draw) for draw in stream.take(PROMPTS_PER_STEP)])

    async def evaluate(step: int, version: int, snapshot: Any) -> list[EvalResult]:
        if snapshot is not None:
            await snapshots.may_begin()
        log.append(f"eval {step} version {version}")
        reward = Estimate(step / 10, None, None, None)
        return [EvalResult("held", step, version, reward=reward, num_prompts=1, num_samples=1)]

    store = CheckpointStore(folder / "checkpoints", CheckpointConfig(**(checkpoint or {})))
    store.prepare()
    found = store.newest().checkpoint
    state = found.state() if found else None
    if found is not None:
        stream.restore(found.read_json("data.json"))
    recorder = Recorder(folder)
    real_phase = recorder.phase

    @contextmanager
    def phase(name: str, policy: str | None = None):
        if name == "save":
            log.append("begin-save")
        with real_phase(name, policy):
            yield
        if name == "save":
            log.append("end-save")

    recorder.phase = phase  # type: ignore[method-assign]
    recorder.start({"policy": state.step} if state else {}, state.metrics if state else None)
    policy = Policy(
        "policy",
        ALGORITHMS[algorithm](),
        engine,
        trainer,
        "shared",
        updates_per_step=updates_per_step,
        epochs_per_step=epochs_per_step,
        critic=critic,
        critic_only_steps=critic_only_steps,
        takes_turns=memory != "none",
    )
    run = Run(
        policy=policy,
        supply=Pull(stream, collect),
        board=Board(["policy"], "policy"),
        memory=make_memory_plan(MemoryConfig(order=memory), engine, policy),
        recorder=recorder,
        store=store,
        save_request=SaveRequest(folder / "save"),
        evals=EvalDispatcher(EvalsConfig(max_in_flight=9), evaluate, snapshots),
        cadence=Cadence(
            num_steps,
            save_every,
            eval_every,
            eval_first,
            counts_epochs=num_epochs is not None,
            debug_exit_after=debug_exit_after,
        ),
        seed=0,
        fingerprint={"seed": 0},
        data_state=stream.state,
        saves=Saves(in_background=background),
        step=state.step if state else 0,
        saved_step=state.step if state else None,
        epoch_ended=state.epoch_ended if state else False,
    )
    return run, log


async def restore(run: Run) -> None:
    """What the builder does with a checkpoint: the trainer comes back at the step of the state."""
    found = run.store.newest().checkpoint
    if found is not None:
        await restore_policy(run.policy, found, found.state())


def rows(folder: Path) -> list[dict[str, float]]:
    """What a run wrote into its metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def drive(run: Run) -> None:
    """Restore and run to the end, and let go of the folder whatever happens."""

    async def body() -> None:
        await restore(run)
        await sync.drive(run)

    try:
        asyncio.run(body())
    finally:
        run.store.close()
