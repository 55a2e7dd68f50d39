"""A run of several policies in virtual time, over all its restarts: real driver, feeds and buffers.

    Settings(seed)   what the run file would say
    Timeline         lives of that run, each from the last checkpoint: killed, failed, ended, ...
    Life             one process: real gate, board, steps, feeds; simulated engines, trainers, disk

`Timeline.live` runs one life, holding the invariants after every callback; `Timeline.verify` is
about the whole.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from drivers.simulated_parts import (
    InjectedError,
    Place,
    SimDisk,
    SimPolicy,
    SimRequest,
    SimRunner,
    measure,
)
from drivers.simulated_settings import Settings
from drivers.virtual_time import run_virtual
from feeds import make_stream

from paceline.data.buffer import Buffer
from paceline.data.tickets import Event
from paceline.drivers import multi
from paceline.drivers.board import Board
from paceline.drivers.feeding import FromFeed
from paceline.drivers.gate import Gate
from paceline.drivers.joint import Joint, Lead
from paceline.drivers.memory import KeepBoth
from paceline.drivers.run import Cadence, Run
from paceline.drivers.saving import Saves
from paceline.drivers.supply import Pull
from paceline.errors import DataError, WeightError
from paceline.evals import EvalDispatcher
from paceline.evals_settings import EvalsConfig
from paceline.observe.recorder import Recorder
from paceline.rollout.feed import Feed

GATE_DEADLINE_S = 2000.0
"""No wait is that long unless it would be for ever."""
MAX_CALLBACKS = 60_000
EVALS = EvalsConfig(timeout_s=30.0).model_copy(update={"sets": (SimpleNamespace(name="held"),)})
PARTS = ("learn", "send", "receive", "save", "write", "runner", "engine", "commit", "eval")


class KilledError(BaseException):
    """The process is gone."""


class MemoryLines:
    """A JSONL file in memory that outlives a process."""

    def __init__(self) -> None:
        self.path, self.items = Path("/nowhere/metrics.jsonl"), []

    def append(self, item: dict[str, Any]) -> None:
        self.items.append(item)

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        self.items = [item for item in self.items if wanted(item)]
        return self.items


class Life:
    """One process, from the last checkpoint on."""

    def __init__(self, settings: Settings, place: Place, disk: SimDisk, rows: MemoryLines) -> None:
        self.settings, self.place, self.disk = settings, place, disk
        self.saved = disk.newest()
        self.state = json.loads(self.saved["state.json"]) if self.saved else None
        self.dropped: dict[str, dict[int, str]] = {name: {} for name in settings.paces}
        if self.saved:
            books = json.loads(self.saved["books"])
            self.dropped = {
                n: {int(o): reason for o, reason in d.items()} for n, d in books.items()
            }
        disk.begin(place, lambda: self._dropped_then)
        self.policies = {
            name: SimPolicy(place, name, disk, pace.max_staleness)
            for name, pace in settings.paces.items()
        }
        place.engines = {name: policy.engine for name, policy in self.policies.items()}
        place.quiet_evals = settings.is_deterministic
        self.recorder = Recorder(Path("/nowhere"), leader="a")
        self.recorder._rows, self.recorder._events = rows, MemoryLines()  # type: ignore[assignment]
        self.recorder.start(self.steps if self.state else {}, self.state and self.state["metrics"])
        epochs = None if settings.is_endless else settings.num_epochs
        self.streams = {
            feed: make_stream(settings.num_prompts, num_epochs=epochs) for feed in settings.feeds
        }
        self.feeds: dict[str, Feed] = {}
        self.buffers: list[Buffer] = []
        self.supplies: dict[str, Any] = {}
        for feed, names in settings.feeds.items():
            self._connect(feed, names)
        self.requests = SimRequest()
        self._restore()

    @property
    def steps(self) -> dict[str, int]:
        if self.state is None:
            return dict.fromkeys(self.settings.paces, 0)
        return {name: progress["step"] for name, progress in self.state["policies"].items()}

    def _connect(self, feed: str, names: list[str]) -> None:
        """As `build.feeds.OpenFeed.connect` does it."""
        paces = {name: self.settings.paces[name] for name in names}
        engines = {name: self.policies[name].engine for name in names}
        runner = SimRunner(self.place, feed, engines, self.settings.lost)
        stream, runs_ahead = self.streams[feed], any(pace.runs_ahead for pace in paces.values())
        if len(names) == 1 and not runs_ahead:
            batch = paces[names[0]].batch
            self.supplies[names[0]] = Pull(stream, lambda step: runner.pull(stream, batch))
            return
        buffers = {
            name: Buffer(
                name, batch=pace.batch, max_staleness=pace.max_staleness,
                on_full=pace.on_full, step=self.steps[name], record=self._record,  # type: ignore[arg-type]
            )
            for name, pace in paces.items()
        }  # fmt: skip
        self.buffers += buffers.values()
        mode = "continuous" if runs_ahead else "wave"
        limit = self.place.rng.choice([None, None, 2])
        self.feeds[feed] = Feed(
            stream, runner, buffers, wave=paces[names[0]].batch, mode=mode, max_in_flight=limit  # type: ignore[arg-type]
        )  # fmt: skip
        self.feeds[feed]._streaks._wave = 10**6
        for name in names:
            self.supplies[name] = FromFeed(self.feeds[feed], name)

    def _record(self, event: Event) -> None:
        if event.kind == "dropped":
            assert event.ordinal not in self.dropped[event.policy], "dropped twice"
            self.dropped[event.policy][event.ordinal] = event.reason

    def _restore(self) -> None:
        if self.saved is None or self.state is None:
            return
        for name, policy in self.policies.items():
            policy.trainer.load(self.saved[name])
            progress = self.state["policies"][name]
            assert policy.trainer.version == progress["step"] == progress["version"]
        data = json.loads(self.saved["data.json"])
        for feed in self.settings.feeds:
            if feed in self.feeds:
                steps = {name: self.steps[name] for name in self.settings.feeds[feed]}
                self.feeds[feed].restore(data[feed], steps)
            else:
                self.streams[feed].restore(data[feed])

    def data_state(self) -> Any:
        self._dropped_then = json.dumps(self.dropped)
        pulled = {f: n[0] for f, n in self.settings.feeds.items() if f not in self.feeds}
        return {feed: self.supplies[name].state() for feed, name in pulled.items()} | {
            feed: found.state() for feed, found in self.feeds.items()
        }

    def joint(self) -> Joint:
        clock = asyncio.get_running_loop().time
        board = Board(self.settings.paces, "a", clock)
        runs = {name: self._run(name, board) for name in self.settings.paces}
        runs["a"].others = [run for name, run in runs.items() if name != "a"]
        self.runs = runs
        self.gate = Gate(
            list(runs), deadline_s=GATE_DEADLINE_S, report=board.report, clock=clock
        )  # fmt: skip
        self.place.is_held = lambda: self.gate.is_held
        return Joint(
            leader=runs["a"],
            board=board,
            gate=self.gate,
            producers={f"feed {name}": self._produce(feed) for name, feed in self.feeds.items()},
            is_deterministic=self.settings.is_deterministic,
            quiet=self._quiet,
            lead=Lead(self.settings.leads()),
            poll_s=3.0,
        )

    def _produce(self, feed: Feed) -> Callable[[], Any]:
        async def produce() -> None:
            self.place.has_begun = True
            await feed.run()

        return produce

    def _run(self, name: str, board: Board) -> Run:
        settings, is_leader = self.settings, name == "a"
        cadence = Cadence(
            settings.num_steps if is_leader else sys.maxsize,
            settings.save_every if is_leader else "never",
            settings.eval_every if is_leader else None,
            settings.eval_first and is_leader,
            counts_epochs=settings.counts_epochs and is_leader,
            publish_every=settings.paces[name].publish_every,
        )

        async def evaluate(step: int, version: int, snapshot: Any) -> Any:
            return await measure(self.place, step, version)

        return Run(
            policy=self.policies[name],  # type: ignore[arg-type]
            supply=self.supplies[name],
            memory=KeepBoth(),
            board=board,
            recorder=self.recorder,
            store=self.disk,  # type: ignore[arg-type]
            save_request=self.requests if is_leader else SimRequest(),  # type: ignore[arg-type]
            evals=EvalDispatcher(EVALS, evaluate),
            cadence=cadence,
            seed=0,
            fingerprint={},
            data_state=self.data_state,
            saves=Saves(in_background=is_leader and settings.background, call=self.place.beside),
            step=self.steps[name],
            saved_step=self.steps[name] if self.state else None,
            epoch_ended=bool(self.state and self.state["epoch_ended"] and is_leader),
        )

    @asynccontextmanager
    async def _quiet(self) -> Any:
        async with AsyncExitStack() as stack:
            for feed in self.feeds.values() if self.settings.is_deterministic else ():
                await stack.enter_async_context(feed.held())
            yield

    def check(self) -> None:
        """What holds at every moment."""
        place = self.place
        assert not place.violations, place.violations
        if place.changing and self.gate.is_held:
            raise AssertionError(f"{place.changing} learn while the gate is held")
        if self.gate.is_held:
            assert place.publishing <= {"a"}, f"{place.publishing} publish while the gate is held"
        for buffer in self.buffers:
            step, published, batch = buffer.trained_step, buffer.published_step, buffer.batch
            if buffer.on_full == "drop_oldest":
                num_ready, most = buffer.num_ready, (buffer.max_staleness + 1) * batch
                assert num_ready <= most, f"{buffer.policy}: {num_ready} ready groups of {most}"
                continue
            used = step * batch + buffer.num_taken + len(buffer._tickets)
            bound = (buffer.max_staleness + published + 1) * batch
            assert used <= bound, f"{buffer.policy}: {used} of {bound} slots"


class Timeline:
    """A run from its first start to its end."""

    def __init__(self, seed: int, schedule: int | None = None) -> None:
        """schedule: of times and disturbances; the settings are by seed alone."""
        self.settings = Settings(seed)
        self.rng = random.Random(f"{seed} {schedule}")
        self.rows = MemoryLines()
        self.disk = SimDisk(Place(self.rng))
        self.ends: Counter[str] = Counter()
        self.num_asked = 0
        self.evals: dict[int, dict[str, int]] = {}

    def run(self, *, is_disturbed: bool = True) -> None:
        num_lives = self.rng.choice([1, 2, 2, 3]) if is_disturbed else 1
        for number in range(num_lives):
            if self.live(is_disturbed=number < num_lives - 1) == "ended":
                break
        self.verify()

    def live(self, *, is_disturbed: bool) -> str:
        place = Place(self.rng)
        place.evals = self.evals
        life = self.life = Life(self.settings, place, self.disk, self.rows)
        disturbance = (
            self.rng.choice(["kill", "fail", "cancel", "none"]) if is_disturbed else "none"
        )
        kill_at = 0
        self.disk.dies_at = 0
        if disturbance == "kill" and self.rng.random() < 0.5:
            self.disk.dies_at = self.rng.randint(1, 4)
        elif disturbance == "kill":
            kill_at = self.rng.randint(1, 500)
        if disturbance == "fail":
            for _ in range(self.rng.choice([1, 1, 2])):
                place.failing[self._part()] = self.rng.randint(1, 5)
        elif self.rng.random() < 0.2 and not self.settings.is_deterministic:
            place.failing["eval"] = self.rng.randint(1, 3)
        place.is_hanging = self.rng.random() < 0.5
        num_checks = 0

        def check() -> None:
            nonlocal num_checks
            num_checks += 1
            if place.is_held is not None:
                life.check()
            self.disk.is_dead |= num_checks == kill_at
            if self.disk.is_dead:
                raise KilledError

        try:
            end = run_virtual(
                lambda: self._drive(life, cancels=disturbance == "cancel"),
                seed=self.rng.getrandbits(32), check=check, max_callbacks=MAX_CALLBACKS,
            )  # fmt: skip
        except KilledError:
            end = "killed"
        self.ends[end] += 1
        return end

    def _part(self) -> str:
        part = self.rng.choice(PARTS)
        if part == "runner":
            return f"runner {self.rng.choice(list(self.settings.feeds))}"
        names = list(self.settings.paces)
        return part if part in ("commit", "eval") else f"{part} {self.rng.choice(names)}"

    async def _drive(self, life: Life, *, cancels: bool) -> str:
        driving = asyncio.create_task(multi.drive(life.joint()), name="drive")
        touching = asyncio.create_task(self._touch(life))
        if cancels:
            delay_s = self.rng.choice([0, 1, 5, 10, 20, 40]) * self.rng.random()
            asyncio.get_running_loop().call_later(delay_s, driving.cancel)
        await asyncio.wait({driving})
        touching.cancel()
        await asyncio.wait({touching})
        assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left"
        assert not life.place.changing
        end = self._end(life, driving)
        for name, engine in life.place.engines.items():
            # A publish that was cut short leaves an engine with weights that nobody can name.
            assert not engine.is_paused or name in life.place.publishing, f"{name} is paused"
            assert engine.num_running == 0
            await engine.aclose()
        assert not life.gate.is_held
        assert not life.gate._requests
        return end

    async def _touch(self, life: Life) -> None:
        """Ask for a save now and then."""
        while self.rng.random() < 0.5:
            await asyncio.sleep(self.rng.choice(range(1, 40)))
            life.requests.is_touched = True
            self.num_asked += 1

    def _end(self, life: Life, driving: asyncio.Task[None]) -> str:
        if driving.cancelled():
            return "cancelled"
        error = driving.exception()
        if error is None:
            return "ended"
        if isinstance(error, DataError) and life.runs["a"].step == 0:
            return "ended"  # every draw was dropped for the leader
        cause = error.__cause__ if isinstance(error, WeightError) else error
        while isinstance(cause, WeightError):
            cause = cause.__cause__
        if not isinstance(cause, InjectedError):
            raise error
        return "failed"

    # The whole

    def verify(self) -> None:
        life, settings = self.life, self.settings
        for feed, names in settings.feeds.items():
            stream = life.streams[feed]
            drawn = set(range(stream._position))
            returned = {place.ordinal for place in stream._returned}
            for name in names:
                buffer = life.feeds[feed].buffers[name] if feed in life.feeds else None
                self._verify_draws(name, drawn, returned, buffer)
        leader = life.policies["a"].trainer
        if self.ends["ended"]:
            assert not self.disk.awaited, "a checkpoint waits for a score that never comes"
            is_done = leader.version == settings.num_steps
            data_ended = life.supplies["a"].is_exhausted
            assert is_done or data_ended, f"ended after {leader.version} steps"
            if settings.save_every != "never" and leader.version:
                assert max(self.disk.saved) == leader.version
            self._verify_rows()

    def _verify_draws(
        self, name: str, drawn: set[int], returned: set[int], buffer: Buffer | None
    ) -> None:
        """Every draw is in exactly one place."""
        batches = self.life.policies[name].trainer.batches
        seen = [ordinal for batch in batches for ordinal, _ in batch]
        assert len(set(seen)) == len(seen), f"{name} trained on a draw twice"
        assert max(map(len, batches), default=0) <= self.settings.paces[name].batch
        dropped = self.life.dropped[name]
        held = set(buffer._tickets) if buffer else set()
        if buffer and buffer._step:
            held |= {ticket.draw.ordinal for ticket in buffer._step.tickets}
        places = [*seen, *dropped, *held, *returned]
        if buffer is None:  # what a stopped collect had drawn is lost with the process
            places += sorted(drawn - set(places))[: self.settings.paces[name].batch]
        assert sorted(places) == sorted(drawn), f"{name}: lost or doubled"
        lost = {o for policy, o in self.settings.lost if policy == name}
        if buffer is not None:
            oldest = {ordinal for ordinal, reason in dropped.items() if reason == "oldest"}
            assert set(dropped) - oldest <= lost
            assert not set(seen) & lost
            if buffer.on_full == "wait":
                assert seen == sorted(seen), "not in the order of draws"
                assert not oldest

    def _verify_rows(self) -> None:
        settings, rows = self.settings, self.rows.items
        last = self.life.policies["a"].trainer.version
        for name in settings.paces:
            found = [row["step"] for row in rows if row["policy"] == name]
            first = 0 if name == "a" and settings.eval_first else 1
            expected = list(range(first, first + len(found)))
            assert found == expected, f"rows of {name}: {found}"
        found = [row for row in rows if row["policy"] == "a"]
        assert found[-1]["step"] in (last, last + 1) if found else last == 0
        behind = settings.paces["a"].publish_every - 1
        for row in found:
            step = min(row["step"], last)
            assert step - behind <= row["version"] <= step

    def outcome(self) -> Any:
        """What must not depend on times where the run is deterministic."""
        data = self.life.data_state()
        batches = {n: p.trainer.batches for n, p in self.life.policies.items()}
        return batches, self.evals, data


def outcomes_differ(timeline: Timeline) -> str:
    """Where a deterministic run ends differently under other times and without disturbances."""
    other = Timeline(timeline.settings.seed, schedule=1)
    other.run(is_disturbed=False)
    (batches, evals, data), (batches_2, evals_2, data_2) = timeline.outcome(), other.outcome()
    common = evals.keys() & evals_2.keys()  # one that failed is left out
    parts = {
        "batches": batches != batches_2,
        "evals": any(evals[step] != evals_2[step] for step in common),
        "data": data != data_2,
    }
    return ", ".join(name for name, differs in parts.items() if differs)
