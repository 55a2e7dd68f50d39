"""The order of everything with several clocks, against fakes that log each call."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from drivers import fake_run
from drivers.fake_joint import Setting, make_world
from drivers.fake_run import make_run, rows
from drivers.virtual_time import run_virtual

from paceline.drivers import multi
from paceline.drivers.gate import Gate
from paceline.drivers.joint import Joint, Lead
from paceline.drivers.run import Run
from paceline.errors import DataError

PAIR = {"a": Setting(), "b": Setting(num_prompts=6)}
JOINT = {"a": Setting(), "b": Setting()}


def drive_alone(run: Run) -> None:
    """One policy under the driver of several."""

    async def body() -> None:
        await fake_run.restore(run)
        gate = Gate(["policy"], deadline_s=500.0, clock=asyncio.get_running_loop().time)
        await multi.drive(Joint(run, run.board, gate, {}, False, fake_quiet, Lead({})))

    try:
        run_virtual(body, shuffle=False)
    finally:
        run.store.close()


def fake_quiet() -> Any:
    return asyncio.timeout(None)


def kept(folder: Path) -> list[dict[str, Any]]:
    """What does not depend on time."""
    found = [
        {k: v for k, v in r.items() if not k.startswith(("time/", "perf/"))} for r in rows(folder)
    ]
    return sorted(found, key=lambda row: (row["policy"], row["step"]))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_steps": 1, "save_every": 1, "eval_every": 1},
        {"num_steps": 5, "save_every": 2, "eval_every": 3},
        {"num_steps": 6, "num_epochs": 2, "save_every": 50, "eval_every": 50},
        {"num_steps": 99, "num_epochs": 1, "save_every": 50, "eval_every": 50},
        {"save_every": "never", "eval_every": None, "eval_first": False},
        {"num_steps": 0},
        {"num_steps": 9, "save_every": 5, "eval_every": 5, "debug_exit_after": 2},
        {"num_steps": 3, "updates_per_step": 2, "epochs_per_step": 2},
    ],
    ids=str,
)
def test_one_policy_is_the_same_as_under_the_sync_driver(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    sync_run, sync_log = make_run(tmp_path / "sync", **settings)
    fake_run.drive(sync_run)
    multi_run, multi_log = make_run(tmp_path / "multi", **settings)
    drive_alone(multi_run)
    assert multi_log == sync_log
    assert kept(tmp_path / "multi") == kept(tmp_path / "sync")
    assert multi_run.policy.trainer.weight == sync_run.policy.trainer.weight  # type: ignore[attr-defined]
    assert multi_run.store.steps() == sync_run.store.steps()


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_one_policy_resumes_the_same_way(tmp_path: Path, stop_after: int) -> None:
    logs = {}
    for name, drive in (("sync", fake_run.drive), ("multi", drive_alone)):
        part, _ = make_run(
            tmp_path / name, num_steps=5, save_every=1, debug_exit_after=stop_after
        )  # fmt: skip
        drive(part)
        rest, logs[name] = make_run(tmp_path / name, num_steps=5, save_every=1)
        drive(rest)
    assert logs["multi"] == logs["sync"]
    assert kept(tmp_path / "multi") == kept(tmp_path / "sync")


def test_a_follower_has_steps_of_its_own_and_the_leader_saves_and_measures(tmp_path: Path) -> None:
    settings = {"a": Setting(num_prompts=6, learn_s=3), "b": Setting(num_prompts=6, learn_s=0.5)}
    world = make_world(tmp_path, settings, num_steps=4, save_every=2, eval_every=4)
    world.drive()
    assert world.joint.leader.step == 4
    assert world.steps()["b"] > 8
    assert world.log.of("eval") == ["eval 4 version 4"]
    # Step 2, step 4, and at the end once more, since b has trained meanwhile.
    assert world.log.count("a-save") == world.log.count("b-save") == 3
    assert world.joint.leader.store.steps() == [2, 4]
    state = world.joint.leader.store.at(4).state()
    assert (state.leader, state.step) == ("a", 4)
    # H16: a version is the number of updates, whoever counts.
    assert {n: p.version for n, p in state.policies.items()} == {
        n: p.step for n, p in state.policies.items()
    }


def test_save_then_publish_then_measure_in_one_stay_at_the_gate(tmp_path: Path) -> None:
    world = make_world(tmp_path, PAIR, num_steps=2, save_every=2, eval_every=2)
    held: list[bool] = []

    async def note(step: int) -> None:
        held.append(world.joint.gate.is_held)

    world.on_eval = note
    world.drive()
    start = world.log.index("a-save")
    own = [entry for entry in world.log[start:] if not entry.startswith("b-")]
    publish = ["a-pause finish", "a-send 2", "a-receive 2", "a-resume"]
    assert own == ["a-save", *publish, "eval 2 version 2"]
    follower = [e for e in world.log[start : world.log.index("eval 2 version 2")] if e[0] == "b"]
    assert follower == ["b-save"]
    assert held == [True]


def test_publishing_every_other_step_and_before_every_eval(tmp_path: Path) -> None:
    settings = {"a": Setting(max_staleness=2, publish_every=2), "b": Setting(max_staleness=1)}
    world = make_world(tmp_path, settings, num_steps=6, eval_every=3, save_every="never")
    world.drive()
    sent = [entry for entry in world.log if entry.startswith("a-send")]
    assert sent == [f"a-send {step}" for step in (0, 2, 3, 4, 6)]
    assert {step: versions["a"] for step, versions in world.evals.items()} == {3: 3, 6: 6}


def test_eval_only_trains_nobody(tmp_path: Path) -> None:
    world = make_world(tmp_path, JOINT, num_steps=0, eval_first=True)
    world.drive()
    assert world.evals == {0: {"a": 0, "b": 0}}
    assert world.steps() == {"a": 0, "b": 0}
    assert not world.log.of("a-save", "b-save", "a-optim_step", "b-optim_step")


def test_debug_exit_forces_nothing_and_stops_the_followers(tmp_path: Path) -> None:
    world = make_world(tmp_path, PAIR, num_steps=9, save_every=5, debug_exit_after=2)
    world.drive()
    assert world.joint.leader.step == 2
    assert not world.log.of("a-save", "b-save")
    assert world.joint.ended.is_set()


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_H4_a_follower_without_data_waits_for_the_end(
    tmp_path: Path, is_deterministic: bool
) -> None:
    """That its task returns is not the end of the run, and nobody waits for it at the gate."""
    settings = {"a": Setting(num_prompts=12), "b": Setting(num_prompts=3)}
    world = make_world(
        tmp_path, settings, num_steps=99, num_epochs=1, save_every=1,
        is_deterministic=is_deterministic,
    )  # fmt: skip
    world.drive()
    assert world.steps() == {"a": 6, "b": 2}
    assert world.joint.leader.store.steps()[-1] == 6
    assert [row["step"] for row in rows(tmp_path) if row["policy"] == "b"][:2] == [1, 2]


@pytest.mark.parametrize("batches", [(2, 2), (3, 2), (1, 4), (4, 1)])
@pytest.mark.parametrize("num_epochs", [1, 3])
def test_shared_data_comes_to_its_end_for_everybody(
    tmp_path: Path, batches: tuple[int, int], num_epochs: int
) -> None:
    settings = {"a": Setting(batch=batches[0]), "b": Setting(batch=batches[1])}
    world = make_world(
        tmp_path, settings, num_prompts=5, num_steps=99, num_epochs=num_epochs,
        is_deterministic=True,
    )  # fmt: skip
    world.drive()
    num_draws = 5 * num_epochs
    assert world.steps() == dict(zip("ab", (-(-num_draws // b) for b in batches), strict=True))
    # Each prompt as often as configured: two episodes of two trained tokens each.
    assert world.weights() == {"a": 4 * num_draws, "b": 4 * num_draws}


def test_no_update_at_all_is_an_error(tmp_path: Path) -> None:
    world = make_world(tmp_path, PAIR, num_steps=3, num_epochs=1)
    world.runs["a"].supply.stream.take(6)  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="without a single update"):
        world.drive()


def test_the_last_eval_measures_the_last_weights(tmp_path: Path) -> None:
    """That a step was the last one shows only when the data that is left teaches nothing."""
    settings = {"a": Setting(max_staleness=1, publish_every=2), "b": Setting(max_staleness=1)}
    world = make_world(tmp_path, settings, num_steps=99, num_epochs=1, eval_every=50)
    runner = world.feeds["shared"]._runner
    runner.config = runner.config.model_copy(update={"dynamic_sampling": True, "max_refills": 99})
    runner._rewards = lambda ordinal, policy: (0.0, float(ordinal < 2))  # type: ignore[attr-defined]
    runner._duration = lambda ordinal: 1.0 if ordinal < 2 else 30.0  # type: ignore[attr-defined]
    world.drive()
    assert world.steps()["a"] == 1
    assert world.evals == {1: {"a": 1, "b": 1}}


def test_resume_takes_everybody_to_his_own_step(tmp_path: Path) -> None:
    settings = {"a": Setting(num_prompts=6, learn_s=3), "b": Setting(num_prompts=6, learn_s=0.5)}
    first = make_world(tmp_path, settings, num_steps=2, save_every=1)
    first.drive()
    state = first.joint.leader.store.at(2).state()
    assert state.policies["b"].step > 2
    second = make_world(tmp_path, settings, num_steps=4, save_every=1)
    second.drive()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    starts = [e for e in events if e["kind"] == "start" and "policy" in e][2:]
    assert {e["policy"]: (e["after_step"], e["version"]) for e in starts} == {
        name: (progress.step, progress.version) for name, progress in state.policies.items()
    }
    for name in settings:
        steps = [row["step"] for row in rows(tmp_path) if row["policy"] == name]
        assert steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("stop_after", [1, 2, 3, 4])
def test_a_deterministic_run_resumes_as_if_nothing_had_happened(
    tmp_path: Path, stop_after: int
) -> None:
    settings = {"a": Setting(batch=2), "b": Setting(batch=3), "c": Setting(num_prompts=5)}
    options: dict[str, Any] = {"num_steps": 5, "save_every": 1, "is_deterministic": True}
    whole = make_world(tmp_path / "whole", settings, **options)
    whole.drive()
    for limit in (stop_after, None):
        part = make_world(tmp_path / "part", settings, debug_exit_after=limit, **options)
        part.drive()
    assert part.weights() == whole.weights()
    assert kept(tmp_path / "part") == kept(tmp_path / "whole")


def test_two_independent_policies_are_two_separate_runs(tmp_path: Path) -> None:
    settings = {"a": Setting(batch=2, num_prompts=6), "b": Setting(batch=3, num_prompts=5)}
    options: dict[str, Any] = {"num_steps": 4, "eval_every": None, "is_deterministic": True}
    both = make_world(tmp_path / "both", settings, **options)
    both.drive()
    for name, setting in settings.items():
        alone = make_world(tmp_path / name, {name: setting}, **options)
        alone.drive()
        # Only when a save comes is up to the leader.
        entries = [entry for entry in both.log if entry.startswith(f"{name}-")]
        own, others = ([e for e in log if not e.endswith("save")] for log in (alone.log, entries))
        assert own == others
        assert alone.weights()[name] == both.weights()[name]
        found = [row for row in kept(tmp_path / "both") if row["policy"] == name]
        assert found == kept(tmp_path / name)
