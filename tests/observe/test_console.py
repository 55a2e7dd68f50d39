from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from crashing import FastFiles
from rich.console import Console

from paceline.observe.console import (
    LiveProgress,
    PlainProgress,
    PolicyView,
    RunConsole,
    before_after_table,
    make_progress,
)
from paceline.observe.formats import format_duration, format_number, sparkline, visible
from paceline.observe.jsonl import read_rows
from paceline.observe.metrics import Metrics
from paceline.observe.recorder import Recorder

VALUES = {
    "rollout/reward": 0.41237,
    "rollout/answer_tokens": 4.25,
    "train/loss": 0.0123456,
    "perf/tokens_per_s": 1523.4,
    "time/step_s": 2.0,
}


def make_console(**changes: object) -> tuple[Console, StringIO]:
    out = StringIO()
    options: dict[str, object] = {"file": out, "width": 100, "color_system": None}
    return Console(**(options | changes)), out  # type: ignore[arg-type]


def test_one_line_a_step() -> None:
    console, out = make_console()
    progress = PlainProgress(console, num_steps=120)
    progress.start({})
    progress.write("policy", 0, {"eval/heldout/reward": 0.3, "time/step_s": 50.0})
    progress.phase("policy", "collect")
    progress.write("policy", 12, VALUES | {"eval/heldout/reward": 0.55})
    progress.write("policy", 13, VALUES | {"time/step_s": 4.0})
    progress.close()
    numbers = "reward 0.4124  length 4.25  loss 0.01235  tokens/s 1523"
    assert out.getvalue().splitlines() == [
        "step 0/120  heldout 0.3",
        f"step 12/120  heldout 0.55  {numbers}  left 3m36s",
        f"step 13/120  heldout 0.55  {numbers}  left 5m21s",
    ]


def test_lines_are_never_wrapped_and_markup_is_no_markup() -> None:
    console, out = make_console(width=20)
    progress = PlainProgress(console, num_steps=9)
    progress.write("policy", 1, VALUES | {"eval/[bold]/reward": 1.0})
    (line,) = out.getvalue().splitlines()
    assert "[bold] 1" in line


def test_several_policies_have_their_names() -> None:
    console, out = make_console()
    progress = PlainProgress(console, num_steps=9)
    progress.start({"solver": 4, "judge": 6})
    progress.write("solver", 5, {"train/loss": 1.0})
    progress.write("judge", 7, {"train/loss": 2.0})
    assert out.getvalue().splitlines() == [
        "solver goes on after step 4",
        "judge goes on after step 6",
        "step 5/9  loss 1",
        "judge step 7/9  loss 2",
    ]


def test_pass_at_1_is_shown_where_it_is_measured() -> None:
    view = PolicyView()
    view.take(1, {"eval/x/pass_at_1": 0.5, "eval/x/reward": 0.7, "eval/x/reward/low": 0.1})
    view.take(2, {"eval/y/reward": 0.2})
    assert view.evals == {"x": 0.5, "y": 0.2}


def test_the_live_view_shows_step_phase_numbers_and_time_left() -> None:
    console, out = make_console(force_terminal=True)
    progress = LiveProgress(console, num_steps=20)
    progress.start({})
    for step in (9, 10):
        progress.write("policy", step, VALUES | {"rollout/reward": step / 10})
    progress.phase("policy", "collect")
    progress.close()
    last = out.getvalue().split("\x1b[2K")[-1] if "\x1b" in out.getvalue() else out.getvalue()
    for word in ("step 10/20", "collect", "20s left", "reward 1", "loss 0.01235", "▁█"):
        assert word in last
    assert "policy" not in last


def test_the_live_view_has_a_block_for_each_policy() -> None:
    console, _ = make_console()
    progress = LiveProgress(console, num_steps=20)
    progress.write("solver", 1, {"train/loss": 1.0})
    progress.write("judge", 2, {"train/loss": 2.0})
    plain, out = make_console()
    plain.print(progress.render())
    lines = [line.split() for line in out.getvalue().splitlines() if line.strip()]
    assert [line[0] for line in lines] == ["solver", "loss", "judge", "loss"]


@pytest.mark.parametrize(
    ("mode", "options", "kind"),
    [
        ("off", {}, None),
        ("plain", {"force_terminal": True}, "PlainProgress"),
        ("rich", {}, "LiveProgress"),
        ("auto", {}, "PlainProgress"),
        ("auto", {"force_terminal": True, "_environ": {"TERM": "dumb"}}, "PlainProgress"),
        ("auto", {"force_terminal": True, "_environ": {"TERM": "xterm"}}, "LiveProgress"),
    ],
)
def test_the_mode_that_is_asked_for(mode: str, options: dict[str, object], kind: str) -> None:
    console, _ = make_console(**options)
    progress = make_progress(mode, num_steps=3, console=console)  # type: ignore[arg-type]
    assert (type(progress._progress).__name__ if progress else None) == kind


class ClosedPipe(StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_reader_that_left_does_not_stop_the_run(caplog: pytest.LogCaptureFixture) -> None:
    console = RunConsole(file=ClosedPipe(), width=80)
    progress = make_progress("plain", num_steps=3, console=console)
    assert progress is not None
    for step in (1, 2):
        progress.write("policy", step, VALUES)
    assert caplog.text.count("the console failed") == 1


def test_console_and_file_show_the_same_number(tmp_path: Path) -> None:
    console, out = make_console()
    progress = PlainProgress(console, num_steps=1)
    recorder = Recorder(tmp_path, progress=progress, clock=lambda: 0.0, files=FastFiles())
    recorder.start({})
    recorder.begin_step("policy", 1)
    metrics = Metrics()
    metrics.mean("rollout/reward", 1.0, weight=1)
    metrics.mean("rollout/reward", 0.0, weight=2)
    recorder.log("policy", metrics)
    recorder.end_step("policy", version=1)
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert row["rollout/reward"] == 1 / 3
    assert f"reward {format_number(row['rollout/reward'])}  " in out.getvalue()


def test_before_and_after() -> None:
    console, out = make_console()
    before = {"eval/x/reward": 0.25, "eval/y/reward": 0.5}
    console.print(before_after_table(before, {"eval/x/reward": 0.75, "eval/y/reward": 0.25}))
    rows = [line.split("│") for line in out.getvalue().splitlines() if "eval" in line]
    assert [[cell.strip() for cell in row[1:-1]] for row in rows] == [
        ["eval/x/reward", "0.25", "0.75", "+0.5"],
        ["eval/y/reward", "0.5", "0.25", "-0.25"],
    ]
    console, out = make_console()
    console.print(before_after_table({}, {"a": 1.0}, names=["a", "b"]))
    assert out.getvalue().count(" - │") == 5


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.41237, "0.4124"), (1523.4, "1523"), (3e-6, "3e-06"), (12.0, "12"), (None, "-"),
        (-0.5, "-0.5"), (123456.7, "123457"), (2e9, "2e+09"), (float("inf"), "inf"), (0.0, "0"),
    ],
)  # fmt: skip
def test_numbers(value: float | None, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0s"), (5.2, "5s"), (59.6, "1m00s"), (100, "1m40s"), (3599.7, "1h00m"), (7300, "2h01m")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_sparklines() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▅▅"
    assert sparkline([0.0, float("nan"), 1.0]) == "▁ █"
    assert sparkline([float("nan")]) == " "
    assert sparkline([]) == ""
    assert len(sparkline(list(map(float, range(100))), width=30)) == 30


def test_visible_text() -> None:
    assert visible("a\tb\nc") == "a␉b\nc"
    assert visible("abcdef", 4) == "abc…"


@pytest.mark.parametrize("kind", [PlainProgress, LiveProgress])
def test_only_the_leader_has_a_last_step(kind: type[PlainProgress] | type[LiveProgress]) -> None:
    console, out = make_console()
    progress = kind(console, num_steps=2, leader="solver")
    progress.start({})
    progress.write("solver", 1, VALUES)
    progress.write("verifier", 3, VALUES)
    progress.close()
    assert "step 1/2" in out.getvalue()
    assert "step 3 " in out.getvalue()
    assert "step 3/" not in out.getvalue()
