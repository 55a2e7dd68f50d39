from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from paceline.errors import MissingExtraError
from paceline.observe.settings import ObserveConfig
from paceline.observe.sinks import TensorBoardSink, Tolerant, make_trackers


class Broken:
    """A tracker whose server is away."""

    def __init__(self) -> None:
        self.calls = 0

    def start(self, steps: Mapping[str, int]) -> None:
        self.calls += 1

    def write(self, policy: str, step: int, values: Mapping[str, float]) -> None:
        self.calls += 1
        raise ConnectionError("the server is away")

    def close(self) -> None:
        self.calls += 1
        raise OSError("still away")


def test_a_failing_tracker_warns_once_and_never_stops_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = Broken()
    tracker = Tolerant("tracker", broken)
    tracker.start({})
    for step in range(3):
        tracker.write("policy", step, {"train/loss": 0.5})
    tracker.close()
    assert broken.calls == 5, "it is tried again: the server may come back"
    assert len(caplog.records) == 1
    assert "tracker failed (ConnectionError: the server is away)" in caplog.text


def test_a_tracker_does_not_swallow_an_interrupt() -> None:
    class Interrupted(Broken):
        def write(self, policy: str, step: int, values: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Tolerant("tracker", Interrupted()).write("policy", 1, {})


@pytest.mark.parametrize(
    ("config", "module", "extra"),
    [
        (ObserveConfig(tensorboard=True), "tensorboard", "tensorboard"),
        (ObserveConfig(wandb="project"), "wandb", "wandb"),
    ],
)
def test_a_missing_extra_is_named_before_the_run(
    config: ObserveConfig, module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = [name for name in sys.modules if name.split(".")[0] == module]
    for name in {*loaded, module}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"observe\.{module}.*paceline\[{extra}\]"):
        make_trackers(config, tmp_path)


def test_without_trackers_there_are_none(tmp_path: Path) -> None:
    assert make_trackers(ObserveConfig(), tmp_path) == []


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads, with later events purged as it does."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.plugin_event_accumulator", reason="extra tensorboard"
    )
    tensor_util = pytest.importorskip("tensorboard.util.tensor_util")
    events = accumulator.EventAccumulator(str(folder), purge_orphaned_data=True)
    events.Reload()
    return {
        tag: [
            (e.step, tensor_util.make_ndarray(e.tensor_proto).item()) for e in events.Tensors(tag)
        ]
        for tag in events.Tags()["tensors"]
    }


def test_tensorboard_gets_the_very_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="extra tensorboard")
    sink = TensorBoardSink(tmp_path)
    sink.start({})
    sink.write("a", 1, {"train/loss": 0.1, "train/kl": math.inf})
    sink.write("b", 1, {"train/loss": 1 / 3})
    sink.write("a", 2, {"train/loss": 0.2})
    sink.close()
    assert scalars(tmp_path / "a") == {
        "train/loss": [(1, 0.1), (2, 0.2)],
        "train/kl": [(1, math.inf)],
    }
    assert scalars(tmp_path / "b") == {"train/loss": [(1, 1 / 3)]}


@pytest.mark.parametrize(
    ("steps", "kept"), [({"policy": 1}, [(1, 0.1), (2, 9.0)]), ({}, [(2, 9.0)])]
)
def test_tensorboard_forgets_steps_that_are_done_again(
    steps: dict[str, int], kept: list[tuple[int, float]], tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard", reason="extra tensorboard")
    first = TensorBoardSink(tmp_path)
    first.start({})
    for step in (1, 2, 3):
        first.write("policy", step, {"train/loss": step / 10})
    first.close()
    second = TensorBoardSink(tmp_path)
    second.start(steps)
    second.write("policy", 2, {"train/loss": 9.0})
    second.close()
    assert scalars(tmp_path / "policy") == {"train/loss": kept}


class FakeRun:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.calls.append(("define", name, step_metric))

    def log(self, row: dict[str, float]) -> None:
        self.calls.append(("log", row))

    def finish(self) -> None:
        self.calls.append("finish")


def test_wandb_gets_the_very_numbers_on_the_axis_of_each_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[dict[str, Any], FakeRun]] = []

    def init(**options: Any) -> FakeRun:
        runs.append((options, FakeRun()))
        return runs[-1][1]

    wandb = ModuleType("wandb")
    wandb.init = init  # type: ignore[attr-defined]
    wandb.util = SimpleNamespace(generate_id=lambda: "abc")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    folder = tmp_path / "run-7"
    folder.mkdir()
    for steps in ({}, {"a": 1}):
        (tracker,) = make_trackers(ObserveConfig(wandb="project"), folder)
        tracker.start(steps)
        tracker.write("a", 1 + len(steps), {"train/loss": 1 / 3})
        tracker.close()
    assert [options for options, _ in runs] == 2 * [
        {
            "project": "project", "name": "run-7", "id": "abc",
            "dir": str(folder), "resume": "allow",
        }
    ]  # fmt: skip
    assert runs[0][1].calls == [
        ("define", "a/step", None),
        ("define", "a/*", "a/step"),
        ("log", {"a/step": 1, "a/train/loss": 1 / 3}),
        "finish",
    ]
