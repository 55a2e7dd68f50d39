"""What a run of several policies refuses to resume from, and what it says."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from drivers.fake_joint import Setting, World, make_world

from paceline.build.joint import _check_policies
from paceline.build.policies import restore_policy
from paceline.checkpoint import PolicyProgress, RunState
from paceline.errors import CheckpointError, ResumeMismatchError

SETTINGS = {"a": Setting(), "b": Setting(num_prompts=6)}


def check(learners: tuple[str, ...], leader: str) -> None:
    state = RunState(4, "a", {"a": PolicyProgress(4, 4), "b": PolicyProgress(7, 7)}, seed=0)
    run_file: Any = SimpleNamespace(learners=learners, leader=leader)
    _check_policies(run_file, state, "runs/x/step-000004")


def test_the_same_policies_are_fine() -> None:
    check(("b", "a"), "a")


@pytest.mark.parametrize(
    ("learners", "leader", "found"),
    [
        (("a",), "a", "only in the checkpoint: b; missing there: none"),
        (("a", "b", "c"), "a", "only in the checkpoint: none; missing there: c"),
        (("a", "c"), "a", "only in the checkpoint: b; missing there: c"),
        (("a", "b"), "b", "was led by 'a', the run file's leader is 'b'"),
    ],
)
def test_other_policies_or_another_leader_are_refused(
    learners: tuple[str, ...], leader: str, found: str
) -> None:
    with pytest.raises(ResumeMismatchError, match="runs/x/step-000004") as caught:
        check(learners, leader)
    assert found in str(caught.value)


def saved(folder: Path) -> World:
    first = make_world(folder, SETTINGS, num_steps=2, save_every=1, eval_every=None)
    first.drive()
    return make_world(folder, SETTINGS, num_steps=3, save_every=1, eval_every=None)


@pytest.mark.parametrize("shift", [-1, 1])
def test_files_of_one_policy_from_another_step_are_refused(tmp_path: Path, shift: int) -> None:
    world = saved(tmp_path)
    checkpoint = world.joint.leader.store.at(2)
    file = checkpoint.policy_folder("b") / "trainer.json"
    content = json.loads(file.read_text())
    state = checkpoint.state()
    file.write_text(json.dumps(content | {"version": content["version"] + shift}))
    with pytest.raises(CheckpointError, match="contradicts itself") as caught:
        asyncio.run(restore_policy(world.runs["b"].policy, checkpoint, state))
    version = state.policies["b"].version
    assert f"version={version}," in str(caught.value)
    assert f"version={version + shift}," in str(caught.value)
    world.joint.leader.store.close()


@pytest.mark.parametrize("lost", ["policies/b/trainer.json", "data.json", "state.json"])
def test_without_a_file_of_the_newest_the_one_before_is_taken(tmp_path: Path, lost: str) -> None:
    world = saved(tmp_path)
    store = world.joint.leader.store
    (store.at(2).folder / lost).unlink()
    found = store.newest()
    store.close()
    assert found.checkpoint is not None
    assert found.checkpoint.step == 1
    assert lost in found.skipped[0].reason


def test_a_buffer_of_another_step_than_its_weights_is_refused(tmp_path: Path) -> None:
    settings = {"a": Setting(), "b": Setting()}
    world = make_world(tmp_path, settings, num_steps=2, save_every=1, eval_every=None)
    world.drive()
    data = world.joint.leader.store.at(2).read_json("data.json")
    with pytest.raises(ResumeMismatchError, match="saved buffer of policy 'b' is of step"):
        world.feeds["shared"].restore(data["shared"], {"a": 2, "b": 5})
