from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from crashing import Crash, CrashingFiles, FastFiles

from paceline.errors import PacelineError
from paceline.observe.jsonl import read_rows
from paceline.observe.metrics import Metrics
from paceline.observe.recorder import Recorder, peak_memory_mib
from paceline.observe.samples import (
    SampleWriter,
    find_samples,
    policy_names,
    read_samples,
    sample_files,
)
from paceline.types import Episode, Group, Prompt, Sample, Status


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


class Shown:
    """A sink and progress that remembers."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start(self, steps: Mapping[str, int]) -> None:
        self.calls.append(("start", dict(steps)))

    def write(self, policy: str, step: int, values: Mapping[str, float]) -> None:
        self.calls.append(("write", policy, step, dict(values)))

    def phase(self, policy: str, name: str | None) -> None:
        self.calls.append(("phase", policy, name))

    def close(self) -> None:
        self.calls.append(("close",))


def make(folder: Path, clock: Clock | None = None, **changes: Any) -> Recorder:
    changes.setdefault("files", FastFiles())
    return Recorder(folder, clock=clock or Clock(), **changes)


def number(name: str, value: float, weight: float = 1.0) -> Metrics:
    metrics = Metrics()
    metrics.mean(name, value * weight, weight)
    return metrics


def one_step(recorder: Recorder, step: int, value: float, policy: str = "policy") -> None:
    recorder.begin_step(policy, step)
    recorder.log(policy, number("train/loss", value))
    recorder.end_step(policy, version=step)


def losses(folder: Path) -> list[tuple[str, int, float]]:
    rows = read_rows(folder / "metrics.jsonl")
    return [(row["policy"], row["step"], row["train/loss"]) for row in rows]


def test_uneven_parts_give_one_number_everywhere(tmp_path: Path) -> None:
    """Case 84. Groups of 1 and of 3: the mean over all four, the same in the file and all sinks."""
    tracker, progress = Shown(), Shown()
    recorder = make(tmp_path, trackers=[tracker], progress=progress)
    recorder.start({})
    recorder.begin_step("policy", 1)
    recorder.log("policy", number("rollout/reward", 1.0, weight=1))
    recorder.log("policy", number("rollout/reward", 0.0, weight=3))
    values = recorder.end_step("policy", version=2)
    assert values["rollout/reward"] == 0.25
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert row == {"step": 1, "policy": "policy", "version": 2, **values}
    assert tracker.calls == [("start", {}), ("write", "policy", 1, values)] == progress.calls


def test_one_row_a_step_and_steps_rise(tmp_path: Path) -> None:
    """Case 86."""
    recorder = make(tmp_path)
    recorder.start({})
    one_step(recorder, 0, 0.5)
    one_step(recorder, 1, 0.4)
    with pytest.raises(ValueError, match="last row is of step 1"):
        recorder.begin_step("policy", 1)
    with pytest.raises(ValueError, match="no open step"):
        recorder.end_step("policy", version=1)
    recorder.begin_step("policy", 2)
    with pytest.raises(ValueError, match="the open step is 2"):
        recorder.begin_step("policy", 3)
    assert losses(tmp_path) == [("policy", 0, 0.5), ("policy", 1, 0.4)]


def test_policies_have_their_own_axes(tmp_path: Path) -> None:
    recorder = make(tmp_path)
    recorder.start({})
    one_step(recorder, 1, 0.1, "a")
    one_step(recorder, 1, 0.2, "b")
    one_step(recorder, 2, 0.3, "b")
    again = make(tmp_path)
    again.start({"a": 1, "b": 1})
    assert losses(tmp_path) == [("a", 1, 0.1), ("b", 1, 0.2)]
    again.begin_step("b", 2)
    with pytest.raises(ValueError, match="last row is of step 1"):
        again.begin_step("a", 1)


def test_who_watches_is_told_of_the_weights_and_trackers_of_the_rows(tmp_path: Path) -> None:
    recorder = make(tmp_path)
    recorder.start({})
    one_step(recorder, 1, 0.5)
    tracker, progress = Shown(), Shown()
    make(tmp_path, trackers=[tracker], progress=progress).start({"policy": 2})
    assert tracker.calls == [("start", {"policy": 1})]
    assert progress.calls == [("start", {"policy": 2})]


def test_a_resume_cuts_later_rows_and_a_torn_line(tmp_path: Path) -> None:
    recorder = make(tmp_path)
    recorder.start({})
    for step in range(5):
        one_step(recorder, step, float(step))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 5, "pol')
    shown = Shown()
    resumed = make(tmp_path, trackers=[shown])
    resumed.start({"policy": 2})
    assert shown.calls == [("start", {"policy": 2})]
    assert [step for _, step, _ in losses(tmp_path)] == [0, 1, 2]
    one_step(resumed, 3, 3.5)
    assert losses(tmp_path)[-1] == ("policy", 3, 3.5)


def test_a_kill_between_save_and_row_loses_nothing(tmp_path: Path) -> None:
    """The numbers go through state.json and come back to the last bit."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
        recorder = make(folder)
        recorder.start({})
        one_step(recorder, 1, 0.1)
        recorder.begin_step("policy", 2)
        recorder.log("policy", number("train/loss", 0.1, weight=3.0))
        recorder.log("policy", number("train/grad_norm", math.inf))
        state = json.dumps(recorder.pending())
        if folder is killed:
            recorder = make(folder)
            recorder.start({"policy": 2}, json.loads(state))
            assert recorder.is_open("policy")
        recorder.log("policy", number("train/loss", 0.7, weight=0.1))
        recorder.end_step("policy", version=2)
        assert not recorder.is_open("policy")
    rows = [read_rows(folder / "metrics.jsonl") for folder in (straight, killed)]
    for row in [*rows[0], *rows[1]]:
        for name in [name for name in row if name.startswith(("time/", "perf/"))]:
            del row[name]
    assert rows[0] == rows[1]
    assert rows[0][1]["train/grad_norm"] == math.inf


def test_a_kill_after_the_row_does_not_write_it_twice(tmp_path: Path) -> None:
    recorder = make(tmp_path)
    recorder.start({})
    recorder.begin_step("policy", 1)
    recorder.log("policy", number("train/loss", 0.5))
    state = recorder.pending()
    recorder.end_step("policy", version=1)
    resumed = make(tmp_path)
    resumed.start({"policy": 1}, state)
    assert not resumed.is_open("policy")
    assert resumed.pending() == {}
    one_step(resumed, 2, 0.4)
    assert losses(tmp_path) == [("policy", 1, 0.5), ("policy", 2, 0.4)]


def test_a_fresh_start_keeps_the_rows_of_an_older_one_aside(tmp_path: Path) -> None:
    recorder = make(tmp_path)
    recorder.start({})
    one_step(recorder, 1, 0.5)
    again = make(tmp_path)
    again.start({})
    assert losses(tmp_path) == []
    assert read_rows(tmp_path / "metrics.jsonl.old")[0]["train/loss"] == 0.5


def test_fresh_starts_never_overwrite_what_older_ones_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for loss in (0.5, 0.4, 0.3):
        samples = SampleWriter(tmp_path / "samples", files=FastFiles())
        recorder = make(tmp_path, samples=samples)
        recorder.start({})
        one_step(recorder, 1, loss)
        recorder.samples(1, "policy", answers(f"of {loss}"))
    for suffix, loss in (("", 0.3), (".old", 0.5), (".old.2", 0.4)):
        assert read_rows(tmp_path / f"metrics.jsonl{suffix}")[0]["train/loss"] == loss
        _, path = find_samples(tmp_path / f"samples{suffix}")
        assert read_samples(path)[0].text == f"of {loss}"
    assert caplog.messages[-1].endswith("is kept as metrics.jsonl.old.2 and samples.old.2")


@pytest.mark.parametrize("half_done", [False, True])
def test_a_crash_at_any_write_loses_no_earlier_row(half_done: bool, tmp_path: Path) -> None:
    for at in range(20):
        folder = tmp_path / f"{at}"
        folder.mkdir()
        first = make(folder)
        first.start({})
        for step in range(1, 4):
            one_step(first, step, step / 10)
        files = CrashingFiles(at, half_done=half_done)
        try:
            second = make(folder, files=files)
            second.start({"policy": 2})
            one_step(second, 3, 0.3)
            one_step(second, 4, 0.4)
        except Crash:
            third = make(folder)
            third.start({"policy": 2})
            assert losses(folder) == [("policy", 1, 0.1), ("policy", 2, 0.2)]
            assert {p.name for p in folder.iterdir()} <= {"metrics.jsonl", "events.jsonl"}
        else:
            assert at > 4, "the crashes must have reached every write"
            return


def test_a_damaged_line_is_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = make(tmp_path)
    recorder.start({})
    one_step(recorder, 1, 0.1)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\x00\xff\n" + path.read_bytes())
    make(tmp_path).start({"policy": 1})
    assert losses(tmp_path) == [("policy", 1, 0.1)]
    assert "metrics.jsonl:1" in caplog.text


class FullDisk(FastFiles):
    is_full = False

    def append(self, path: Path, data: bytes) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device", str(path))
        super().append(path, data)


def test_a_row_that_can_not_be_written_is_an_error(tmp_path: Path) -> None:
    files = FullDisk()
    recorder = make(tmp_path, files=files)
    recorder.start({})
    files.is_full = True
    with pytest.raises(PacelineError, match=r"metrics\.jsonl: .*No space left"):
        one_step(recorder, 1, 0.1)
    with pytest.raises(PacelineError, match=r"events\.jsonl"):
        recorder.event("x")


def test_phases_are_timed_and_shown(tmp_path: Path) -> None:
    clock, shown = Clock(), Shown()
    recorder = make(tmp_path, clock, progress=shown)
    recorder.start({})
    recorder.begin_step("policy", 1)
    with recorder.phase("collect"):
        clock.s += 2
        with recorder.phase("score"):
            clock.s += 1
            assert recorder.open_phases() == {"policy": ("score", 1.0)}
        assert recorder.open_phases() == {"policy": ("collect", 3.0)}
    with recorder.phase("collect"):
        clock.s += 0.5
    assert recorder.open_phases() == {}
    clock.s += 1
    values = recorder.end_step("policy", version=1)
    times = {name: value for name, value in values.items() if name.startswith("time/")}
    assert times == {"time/collect_s": 3.5, "time/score_s": 1.0, "time/step_s": 4.5}
    phases = [name for call, _, *rest in shown.calls[1:-1] if call == "phase" for name in rest]
    assert phases == ["collect", "score", "collect", None, "collect", None]
    clock.s += 7
    recorder.begin_step("policy", 2)
    assert recorder.end_step("policy", version=2)["time/step_s"] == 7.0


def test_an_error_says_in_which_phase_it_came(tmp_path: Path) -> None:
    recorder = make(tmp_path, leader="solver")
    recorder.start({})
    recorder.begin_step("solver", 3)
    with (
        pytest.raises(RuntimeError, match="boom") as caught,
        recorder.phase("learn"),
        recorder.phase("score"),
    ):
        raise RuntimeError("boom")
    assert caught.value.__notes__ == ["in phase 'score' of step 3, policy 'solver'"]
    with pytest.raises(RuntimeError) as caught, recorder.phase("save", "judge"):
        raise RuntimeError
    assert caught.value.__notes__ == ["in phase 'save' between steps, policy 'judge'"]


@pytest.mark.parametrize("name", ["step", "", "two words", "a/b", "Collect"])
def test_a_phase_needs_a_plain_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can not name a phase"), make(tmp_path).phase(name):
        pass


def test_tokens_per_second_are_of_the_whole_step(tmp_path: Path) -> None:
    clock = Clock()
    recorder = make(tmp_path, clock)
    recorder.start({})
    recorder.begin_step("policy", 1)
    metrics = Metrics()
    metrics.sum("rollout/sampled_tokens", 300)
    recorder.log("policy", metrics)
    clock.s += 4
    values = recorder.end_step("policy", version=1)
    assert values["perf/tokens_per_s"] == 75.0
    assert 1 < values["perf/peak_memory_mib"] <= peak_memory_mib() < 1e6


def test_events_have_a_time_and_survive_a_torn_line(tmp_path: Path) -> None:
    recorder = make(tmp_path, now=lambda: 86400.25)
    recorder.start({})
    recorder.event("save", step=3)
    path = tmp_path / "events.jsonl"
    path.write_bytes(path.read_bytes() + b'{"time"')
    again = make(tmp_path, now=lambda: 86401.0)
    again.start({"policy": 3})
    again.event("end")
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"time": "1970-01-02T00:00:00.250+00:00", "kind": "start", "steps": {}},
        {"time": "1970-01-02T00:00:00.250+00:00", "kind": "save", "step": 3},
        {"time": "1970-01-02T00:00:01.000+00:00", "kind": "start", "steps": {"policy": 3}},
        {"time": "1970-01-02T00:00:01.000+00:00", "kind": "end"},
    ]


def test_closing_closes_every_sink(tmp_path: Path) -> None:
    tracker, progress = Shown(), Shown()
    make(tmp_path, trackers=[tracker], progress=progress).close()
    assert tracker.calls == progress.calls == [("close",)]


def answers(text: str) -> list[Group]:
    sample = Sample(
        "policy", "p", 0, [3, 4], [False, True], [0.0, -0.5], [-1, 2], Status.COMPLETED,
        reward=1.0, text=text,
    )  # fmt: skip
    return [Group(Prompt("p", text="1+1="), [Episode("p", 0, [sample])])]


def test_answers_of_evals_are_kept_where_samples_are(tmp_path: Path) -> None:
    recorder = make(tmp_path, samples=SampleWriter(tmp_path / "samples", files=FastFiles()))
    recorder.start({})
    recorder.eval_samples(0, "held", answers("before"))
    recorder.eval_samples(4, "held", answers("after"))
    recorder.eval_samples(4, "skipped", [])
    folder = tmp_path / "samples"
    assert [path.name for path in folder.iterdir()] == ["eval-held"]
    step, path = find_samples(folder / "eval-held")
    assert (step, read_samples(path)[0].text) == (4, "after")
    recorder.start({"policy": 2})
    assert find_samples(folder / "eval-held")[0] == 0
    recorder.start({})
    assert not folder.exists()
    assert find_samples(tmp_path / "samples.old" / "eval-held")[0] == 0


def test_without_samples_no_answers_are_kept(tmp_path: Path) -> None:
    recorder = make(tmp_path)
    recorder.start({})
    recorder.eval_samples(0, "held", answers("before"))
    assert not (tmp_path / "samples").exists()


def test_several_policies_keep_their_samples_apart(tmp_path: Path) -> None:
    def opened() -> Recorder:
        samples = SampleWriter(tmp_path / "samples", files=FastFiles())
        return make(tmp_path, samples=samples, has_several=True)

    recorder = opened()
    recorder.start({})
    for step in (1, 2):
        recorder.samples(step, "policy", answers(f"leader {step}"))
    recorder.samples(1, "policy", answers("leader"))
    recorder.samples(3, "other", [])
    recorder.close()
    opened().start({"policy": 1, "other": 3})
    folder = tmp_path / "samples"
    assert policy_names(folder) == ["other", "policy"]
    assert list(sample_files(folder / "policy-policy")) == [1]
    assert list(sample_files(folder / "policy-other")) == [3]
    opened().start({})
    assert find_samples(tmp_path / "samples.old" / "policy-other")[0] == 3
