"""What a run shows while it runs: a live view on a terminal, else one line a step.

    step 12/120  reward 0.4124  heldout 0.55  length 4.2  tokens/s 1523  loss 0.0123  left 1m40s

The numbers are those of the rows, see `formats.format_number`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.observe.formats import format_duration, format_number, sparkline
from paceline.observe.recorder import Progress
from paceline.observe.sinks import Tolerant

Mode = Literal["auto", "rich", "plain", "off"]
FIELDS = (
    ("reward", "rollout/reward"),
    ("length", "rollout/answer_tokens"),
    ("nll", "train/nll"),
    ("loss", "train/loss"),
    ("tokens/s", "perf/tokens_per_s"),
)
EVAL_SCORE = re.compile(r"eval/([^/]+)/(reward|pass_at_1)")
RECENT_STEPS = 20


class RunConsole(Console):
    """Standard output; rich would end the process when the reader of a pipe has left."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise BrokenPipeError("nobody reads the output any more")


@dataclass(slots=True)
class PolicyView:
    """What is known of one policy."""

    step: int = 0
    values: Mapping[str, float] = field(default_factory=dict)
    evals: dict[str, float] = field(default_factory=dict)
    """Eval set -> its last score: the chance to pass if that is measured, else the reward."""
    rewards: list[float] = field(default_factory=list)
    durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    phase: str | None = None

    def take(self, step: int, values: Mapping[str, float]) -> None:
        self.step, self.values = step, values
        for name in sorted(values, key=lambda name: "pass_at_1" in name):
            if match := EVAL_SCORE.fullmatch(name):
                self.evals[match[1]] = values[name]
        if "rollout/reward" in values:
            self.rewards.append(values["rollout/reward"])
        if step > 0 and "time/step_s" in values:
            self.durations_s.append(values["time/step_s"])

    def fields(self) -> list[tuple[str, str]]:
        """Label and number, in the order in which they are shown."""
        shown = [(label, self.values[name]) for label, name in FIELDS if name in self.values]
        evals = list(self.evals.items())
        return [(label, format_number(value)) for label, value in [*evals, *shown]]

    def seconds_left(self, num_steps: int | None) -> float | None:
        """From the mean of the last steps; None before there is one, or without an end."""
        if not self.durations_s or num_steps is None:
            return None
        mean = sum(self.durations_s) / len(self.durations_s)
        return mean * max(0, num_steps - self.step)


@dataclass(frozen=True, slots=True)
class _Total:
    """How many steps a policy will do: known of the leader alone."""

    num_steps: int
    leader: str | None

    def of(self, policy: str) -> int | None:
        return self.num_steps if self.leader in (None, policy) else None

    def shown(self, policy: str, step: int) -> str:
        total = self.of(policy)
        return f"step {step}" if total is None else f"step {step}/{total}"


class PlainProgress:
    """One line a step, for files and pipes."""

    def __init__(self, console: Console, num_steps: int, leader: str | None = None) -> None:
        """leader: whose steps `num_steps` counts, where there are several policies."""
        self._console = console
        self._total = _Total(num_steps, leader)
        self._views: dict[str, PolicyView] = {}

    def start(self, steps: Mapping[str, int]) -> None:
        for policy, step in steps.items():
            self._print(f"{policy} goes on after step {step}")

    def write(self, policy: str, step: int, values: Mapping[str, float]) -> None:
        view = self._views.setdefault(policy, PolicyView())
        view.take(step, values)
        name = f"{policy} " if len(self._views) > 1 else ""
        left = view.seconds_left(self._total.of(policy))
        words = [f"{name}{self._total.shown(policy, step)}"]
        words += [f"{label} {number}" for label, number in view.fields()]
        words += [f"left {format_duration(left)}"] if left is not None else []
        self._print("  ".join(words))

    def phase(self, policy: str, name: str | None) -> None:
        pass

    def close(self) -> None:
        pass

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


class LiveProgress:
    """A block for each policy, drawn anew whenever something changes; no thread of its own."""

    def __init__(self, console: Console, num_steps: int, leader: str | None = None) -> None:
        """leader: whose steps `num_steps` counts, where there are several policies."""
        self._console = console
        self._total = _Total(num_steps, leader)
        self._views: dict[str, PolicyView] = {}
        self._live = Live(get_renderable=self.render, console=console, auto_refresh=False)

    def start(self, steps: Mapping[str, int]) -> None:
        for policy, step in steps.items():
            self._views[policy] = PolicyView(step)
        self._live.start()

    def write(self, policy: str, step: int, values: Mapping[str, float]) -> None:
        self._views.setdefault(policy, PolicyView()).take(step, values)
        self._live.refresh()

    def phase(self, policy: str, name: str | None) -> None:
        self._views.setdefault(policy, PolicyView()).phase = name
        self._live.refresh()

    def close(self) -> None:
        self._live.stop()

    def render(self) -> Group:
        names = len(self._views) > 1
        return Group(*(self._block(p, v, has_name=names) for p, v in self._views.items()))

    def _block(self, policy: str, view: PolicyView, *, has_name: bool) -> Group:
        head = Table.grid(padding=(0, 2))
        total = self._total.of(policy)
        left = view.seconds_left(total)
        bar = ProgressBar(total=max(1, total or 0), completed=view.step, width=30)
        head.add_row(
            *([Text(policy, style="bold")] if has_name else []),
            Text(self._total.shown(policy, view.step), style="bold"),
            Text() if total is None else bar,
            Text("" if left is None else f"{format_duration(left)} left"),
            Text(view.phase or "", style="dim"),
        )
        numbers = Table.grid(padding=(0, 2))
        words = [Text.assemble((f"{label} ", "dim"), n) for label, n in view.fields()]
        if words:
            numbers.add_row(*words)
        line = Text.assemble(("reward ", "dim"), sparkline(view.rewards, width=40))
        return Group(head, numbers, line if len(view.rewards) > 1 else Text())


class TolerantProgress(Tolerant):
    """A terminal that went away is no reason to lose a run."""

    def __init__(self, progress: Progress) -> None:
        super().__init__("the console", progress)
        self._progress = progress

    def phase(self, policy: str, name: str | None) -> None:
        self._attempt(lambda: self._progress.phase(policy, name))


def make_progress(
    mode: Mode, *, num_steps: int, leader: str | None = None, console: Console | None = None
) -> TolerantProgress | None:
    """What `observe.console` asks for; None for `off`."""
    console = RunConsole() if console is None else console
    if mode == "auto":
        can_draw = console.is_terminal and not console.is_dumb_terminal
        mode = "rich" if can_draw and console.encoding.startswith("utf") else "plain"
    match mode:
        case "off":
            return None
        case "plain":
            return TolerantProgress(PlainProgress(console, num_steps, leader))
        case "rich":
            return TolerantProgress(LiveProgress(console, num_steps, leader))


def before_after_table(
    before: Mapping[str, float], after: Mapping[str, float], names: Sequence[str] | None = None
) -> Table:
    """The numbers of two evals side by side, by default all that either has."""
    table = Table("metric", title="before and after")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    for name in sorted({*before, *after}) if names is None else names:
        old, new = before.get(name), after.get(name)
        both = old is not None and new is not None
        change = new - old if old is not None and new is not None else None
        sign = "+" if both and change is not None and change > 0 else ""
        table.add_row(
            Text(name), format_number(old), format_number(new), sign + format_number(change)
        )
    return table
