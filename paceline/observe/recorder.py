"""Gathers the numbers of a step and writes them once: one row per policy and step.

    begin_step --log, phase--> open step --end_step--> metrics.jsonl, trackers, console
                                   '--pending--> state.json --start--> open step

A checkpoint is made before its step's row is written, so it carries the numbers of the open
step; a run that was killed in between takes them back and still owes the row.
"""

from __future__ import annotations

import logging
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import PacelineError
from paceline.observe.files import REAL_FILES, Files, set_aside
from paceline.observe.jsonl import JsonlFile
from paceline.observe.ledger import Entry, Ledger
from paceline.observe.metrics import Metrics
from paceline.observe.samples import SampleWriter, policy_names
from paceline.observe.sinks import Sink
from paceline.types import Group, JsonValue

logger = logging.getLogger(__name__)

PHASE_NAME = re.compile(r"[a-z][a-z_]*")


class Progress(Sink, Protocol):
    """A sink that also shows what a run is doing right now."""

    def phase(self, policy: str, name: str | None) -> None:
        """The innermost phase that is open now; None between phases."""


class Recorder:
    """Owns `metrics.jsonl` and `events.jsonl` in a run's folder. Call `start` before anything."""

    def __init__(
        self,
        folder: Path,
        *,
        leader: str = "policy",
        trackers: Sequence[Sink] = (),
        progress: Progress | None = None,
        samples: SampleWriter | None = None,
        ledger: Ledger | None = None,
        has_several: bool = False,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        files: Files = REAL_FILES,
    ) -> None:
        """has_several: each policy's samples have a folder of their own, since steps are theirs."""
        self._rows = JsonlFile(folder / "metrics.jsonl", files)
        self._events = JsonlFile(folder / "events.jsonl", files)
        self._leader = leader
        self._progress = progress
        self._sinks = [*trackers, *([progress] if progress is not None else [])]
        self._samples = samples
        self._ledger = ledger
        self._has_several = has_several
        self._files = files
        self._clock = clock
        self._now = now
        self._numbers: dict[str, Metrics] = {}
        self._open_step: dict[str, int] = {}
        self._last_step: dict[str, int] = {}
        self._row_began: dict[str, float] = {}
        self._phases: dict[str, list[tuple[str, float]]] = {}
        self._began = clock()

    def start(
        self, steps: Mapping[str, int], pending: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Go on after these steps, policy by policy; without any, start anew.

        Rows after them are cut off, since those steps are done again. Where the row of such a step
        is missing and `pending` has its numbers, the step is open again and `end_step` is due. A
        fresh start moves the rows and samples that an older one left to `metrics.jsonl.old` and
        `samples.old`, or, if those are taken, to `.old.2` and so on. Each start is an event.
        """
        self._events.keep(lambda event: True)
        if not steps:
            self._set_aside()
        rows = self._rows.keep(lambda row: row["step"] <= steps.get(row["policy"], -1))
        if self._ledger is not None:
            self._ledger.start(steps)
        self._last_step = {row["policy"]: row["step"] for row in rows}
        self._numbers, self._open_step, self._row_began = {}, {}, {}
        self._began = self._clock()
        for policy, state in (pending or {}).items():
            if self._last_step.get(policy, -1) < state["step"] <= steps.get(policy, -1):
                self._open_step[policy] = state["step"]
                self._numbers[policy] = Metrics.from_state(state["numbers"])
        if self._samples is not None:
            self._samples.start(steps.get(self._leader, max(steps.values(), default=-1)))
            for name in policy_names(self._samples.folder):
                self._samples.of_policy(name).start(steps.get(name, -1))
        for sink in self._sinks:
            # A row may be missing of a step that is in the weights; who watches is told of those.
            sink.start(steps if sink is self._progress else self._last_step)
        self.event("start", steps=dict(steps))

    def _set_aside(self) -> None:
        """What a former start left is somebody's work, even if nothing was saved."""
        left = [self._rows.path]
        if self._ledger is not None:
            left.append(self._ledger.path)
        if self._samples is not None and self._samples.has_files():
            left.append(self._samples.folder)
        try:
            moved = set_aside(left, self._files)
        except OSError as error:
            raise PacelineError(
                f"can not move what a former run left in {self._rows.path.parent}: {error}"
            ) from error
        if moved:
            logger.warning(
                "the run starts anew; what a former one left in %s is kept as %s",
                self._rows.path.parent,
                " and ".join(path.name for path in moved),
            )

    def begin_step(self, policy: str, step: int) -> None:
        """Open a step of a policy; ValueError unless it comes after all rows of the policy."""
        last = self._last_step.get(policy, -1)
        if step <= last or policy in self._open_step:
            raise ValueError(
                f"policy {policy!r} can not begin step {step}: its last row is of step {last}, "
                f"and the open step is {self._open_step.get(policy)}"
            )
        self._open_step[policy] = step

    def log(self, policy: str, metrics: Metrics) -> None:
        """Merge numbers into the next row of a policy."""
        self._numbers.setdefault(policy, Metrics()).merge(metrics)

    def is_open(self, policy: str) -> bool:
        """True from `begin_step` to `end_step`, also if a restart lies between them."""
        return policy in self._open_step

    def pending(self) -> dict[str, JsonValue]:
        """The exact numbers of the steps that are open, for `RunState.metrics`."""
        return {
            policy: {"step": step, "numbers": self._numbers.get(policy, Metrics()).state()}
            for policy, step in self._open_step.items()
        }

    def end_step(self, policy: str, version: int) -> dict[str, float]:
        """Write the one row of the open step everywhere; returns its numbers.

        Raises PacelineError if `metrics.jsonl` can not be written, ValueError without an open step.
        """
        if policy not in self._open_step:
            raise ValueError(f"policy {policy!r} has no open step to end")
        step = self._open_step[policy]
        values = self._final_values(policy)
        self._rows.append({"step": step, "policy": policy, "version": version, **values})
        del self._open_step[policy]
        self._last_step[policy] = step
        for sink in self._sinks:
            sink.write(policy, step, values)
        return values

    def _final_values(self, policy: str) -> dict[str, float]:
        metrics = self._numbers.pop(policy, Metrics())
        now = self._clock()
        seconds = now - self._row_began.get(policy, self._began)
        self._row_began[policy] = now
        metrics.sum("time/step_s", seconds)
        metrics.max("perf/peak_memory_mib", peak_memory_mib())
        if "rollout/sampled_tokens" in metrics and seconds > 0:
            metrics.mean("perf/tokens_per_s", metrics["rollout/sampled_tokens"].total, seconds)
        return metrics.values()

    def samples(
        self,
        step: int,
        policy: str,
        groups: Sequence[Group],
        advantages: Sequence[Sequence[float]] | None = None,
        dropped: Sequence[tuple[Group, str]] = (),
    ) -> None:
        """Keep the samples of a step, if `[observe]` asks for it. See `SampleWriter.write`."""
        if self._samples is not None:
            writer = self._samples.of_policy(policy) if self._has_several else self._samples
            writer.write(step, groups, advantages, policy=policy, dropped=dropped)

    def account(self, entry: Entry) -> None:
        """Keep what became of the prompts of a step, before it is saved."""
        if self._ledger is not None:
            self._ledger.write(entry)

    def eval_samples(self, step: int, name: str, groups: Sequence[Group]) -> None:
        """Keep the answers to an eval set, if `[observe]` asks for samples; none, no file."""
        if self._samples is not None and groups:
            self._samples.of_eval(name).write(step, groups)

    @contextmanager
    def phase(self, name: str, policy: str | None = None) -> Iterator[None]:
        """Time a part of the step as `time/<name>_s`; an error on the way is told where it was.

        Without a policy it is a phase of the leader.
        """
        if not PHASE_NAME.fullmatch(name) or name == "step":
            raise ValueError(f"{name!r} can not name a phase")
        policy = self._leader if policy is None else policy
        stack = self._phases.setdefault(policy, [])
        entry = (name, self._clock())
        stack.append(entry)
        self._show_phase(policy)
        try:
            yield
        except Exception as error:
            self._note_phase(error, policy)
            raise
        finally:
            stack.remove(entry)
            metrics = Metrics()
            metrics.sum(f"time/{name}_s", self._clock() - entry[1])
            self.log(policy, metrics)
            self._show_phase(policy)

    def _note_phase(self, error: Exception, policy: str) -> None:
        """The innermost phase goes first and is the one that is told."""
        if not any(note.startswith("in phase ") for note in getattr(error, "__notes__", ())):
            name = self._phases[policy][-1][0]
            step = self._open_step.get(policy)
            where = "between steps" if step is None else f"of step {step}"
            error.add_note(f"in phase {name!r} {where}, policy {policy!r}")

    def _show_phase(self, policy: str) -> None:
        if self._progress is not None:
            stack = self._phases[policy]
            self._progress.phase(policy, stack[-1][0] if stack else None)

    def open_phases(self) -> dict[str, tuple[str, float]]:
        """Policy -> the innermost phase it is in, and for how many seconds."""
        now = self._clock()
        stacks = self._phases.items()
        return {policy: (s[-1][0], now - s[-1][1]) for policy, s in stacks if s}

    def event(self, kind: str, **fields: JsonValue) -> None:
        """Append one thing that happened to `events.jsonl`, with its time (UTC)."""
        moment = datetime.fromtimestamp(self._now(), UTC).isoformat(timespec="milliseconds")
        self._events.append({"time": moment, "kind": kind, **fields})

    def close(self) -> None:
        """Close trackers and progress; numbers without a row are left to the checkpoint."""
        for sink in self._sinks:
            sink.close()


def peak_memory_mib() -> float:
    """Most memory that this process has held so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
