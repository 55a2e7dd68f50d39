"""Traps of a run as a whole, with its real feeds, buffers, gate and supervisor."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from drivers.fake_joint import Setting, make_world
from drivers.fake_run import rows
from drivers.meetings import Busy, Make, WithBarrier, WithGate, ended
from drivers.virtual_time import DeadlockError, run_virtual
from feeds import FakeRunner, Pace, World

from paceline.build.joint import steps_of_follower
from paceline.drivers import multi


def joint_run(make: Make, max_staleness: int, learn_s: tuple[float, float]) -> Busy:
    """Leader and follower share every episode; the leader saves every second step."""
    busy = Busy()

    async def body() -> None:
        meeting = make("follower")
        paces = {
            "leader": Pace(batch=1, max_staleness=max_staleness),
            "follower": Pace(batch=1, max_staleness=max_staleness),
        }
        world = World(paces, FakeRunner(paces, duration=lambda ordinal: 0.1))

        async def step(name: str, number: int, seconds: float) -> None:
            async with meeting.waiting(name) if name == "follower" else asyncio.timeout(None):
                await world.taps[name].collect(number)
            await busy.train(seconds)
            world.taps[name].learned()

        async def follow() -> None:
            number = 1
            while True:
                await step("follower", number, learn_s[1])
                await meeting.between_steps("follower")
                world.taps["follower"].published(number)
                number += 1

        tasks = [asyncio.create_task(world.feed.run()), asyncio.create_task(follow())]
        for number in range(1, 3 * max_staleness + 20):
            await step("leader", number, learn_s[0])
            if number % 2 == 0:
                await busy.save(meeting, 0.5)
            world.taps["leader"].published(number)
        await ended(*tasks)

    run_virtual(body, check=busy.check)
    return busy


@pytest.mark.parametrize("num_groups", [1, 2, 8, 64])
@pytest.mark.parametrize("learn_s", [(10.0, 0.5), (0.5, 10.0)], ids=["leader", "follower"])
def test_H2_joint_episodes_do_not_deadlock_whatever_fits_and_whoever_is_slow(
    num_groups: int, learn_s: tuple[float, float]
) -> None:
    if learn_s[0] > learn_s[1]:  # the follower waits for data that the leader's slots hold up
        with pytest.raises(DeadlockError):
            joint_run(WithBarrier, num_groups - 1, learn_s)
    assert joint_run(WithGate, num_groups - 1, learn_s).num_violations == 0


@pytest.mark.parametrize("at", [0.5, 1.5, 2.5])
def test_H8_a_run_that_is_cancelled_in_a_save_keeps_the_save_before(
    tmp_path: Path, at: float
) -> None:
    settings = {"a": Setting(), "b": Setting(num_prompts=6)}
    world = make_world(tmp_path, settings, num_steps=9, save_every=1, eval_every=None)
    run = world.runs["a"]

    async def cut(folder: Path, later: Any) -> None:
        if len(run.store.steps()) == 2:
            asyncio.get_running_loop().call_later(at, driving[0].cancel)
        await asyncio.sleep(1.0)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model").write_text("half")
        await asyncio.sleep(2.0)

    driving: list[Any] = []
    run.policy.trainer.save = cut  # type: ignore[method-assign]
    joint = world.joint

    async def body() -> None:
        driving.append(asyncio.create_task(multi.drive(joint)))
        await asyncio.wait(driving)
        assert driving[0].cancelled()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(body, shuffle=False)
    found = run.store.newest()
    assert found.checkpoint is not None
    assert (found.checkpoint.step, found.skipped) == (2, [])
    assert not joint.gate.is_held
    assert not list((tmp_path / "checkpoints").glob(".tmp*"))
    run.store.close()


def test_H13_two_policies_at_the_same_step_share_no_file_and_no_row(tmp_path: Path) -> None:
    settings = {"a": Setting(), "b": Setting()}
    world = make_world(tmp_path, settings, num_steps=3, save_every=3, is_deterministic=True)
    world.drive()
    folder = world.joint.leader.store.at(3).folder
    assert sorted(path.name for path in (folder / "policies").iterdir()) == ["a", "b"]
    keys = [(row["policy"], row["step"]) for row in rows(tmp_path)]
    assert sorted(keys) == [(name, step) for name in "ab" for step in (1, 2, 3)]


def test_H15_a_follower_with_smaller_batches_has_a_longer_schedule() -> None:
    """The naive horizon, that of the leader, would end its learning rate at half of its steps."""
    assert steps_of_follower(10, leader_batch=8, batch=4) == 20
    assert steps_of_follower(10, leader_batch=8, batch=3) == 27
    assert steps_of_follower(10, leader_batch=4, batch=8) == 5
    assert steps_of_follower(10, leader_batch=4, batch=None) == 10


def test_H18_the_last_save_has_what_followers_have_learned_since_the_one_before(
    tmp_path: Path,
) -> None:
    settings = {"a": Setting(learn_s=5), "b": Setting(num_prompts=6, learn_s=0.5)}
    world = make_world(tmp_path, settings, num_steps=3, save_every=50, eval_every=None)
    world.drive()
    state = world.joint.leader.store.at(3).state()
    assert state.policies["b"].step >= 9
    assert world.steps()["b"] - state.policies["b"].step <= 1


@pytest.mark.parametrize("is_hanging", [False, True])
def test_H21_an_eval_that_fails_or_hangs_is_left_out(tmp_path: Path, is_hanging: bool) -> None:
    settings = {"a": Setting(), "b": Setting()}
    world = make_world(tmp_path, settings, num_steps=4, eval_every=2)

    async def sick(step: int) -> None:
        if step == 2:
            if is_hanging:
                await asyncio.get_running_loop().create_future()
            raise OSError("engine is sick")

    world.on_eval = sick
    world.drive()
    assert list(world.evals) == [4]
    assert world.joint.leader.step == 4


def test_H22_a_save_that_is_asked_for_is_made_while_the_leader_waits_for_data(
    tmp_path: Path,
) -> None:
    settings = {"a": Setting(), "b": Setting(num_prompts=6)}
    world = make_world(tmp_path, settings, num_steps=2, save_every="never", eval_every=None)
    run = world.runs["a"]
    take, seen = run.supply.take, []  # type: ignore[attr-defined]

    async def starve(step: int) -> Any:
        if step == 2:
            await asyncio.sleep(20)
            (tmp_path / "save").touch()
            await asyncio.sleep(80)
            seen.extend(run.store.steps())
        return await take(step)

    run.supply.take = starve  # type: ignore[attr-defined]
    world.drive()
    assert seen == [1]
    assert not list(tmp_path.glob("save*"))
    # The follower was there with all it had learned; and what was saved stays no longer than due.
    assert run.store.at(1).state().policies["b"].step > 3
    assert not run.store._awaited


@pytest.mark.parametrize("max_lead", [1, 3])
def test_H22_a_follower_does_not_run_ahead_of_a_starving_leader(
    tmp_path: Path, max_lead: int
) -> None:
    settings = {"a": Setting(sample_s=50), "b": Setting(num_prompts=6, max_lead=max_lead)}
    world = make_world(tmp_path, settings, num_steps=3, save_every=1, eval_every=None)
    world.drive()
    for step in (1, 2, 3):
        state = world.joint.leader.store.at(step).state()
        assert state.policies["b"].step <= step + max_lead
    assert world.steps()["b"] in (2 + max_lead, 3 + max_lead)


def test_H22_a_lead_does_not_keep_the_leader_from_data_that_they_share(tmp_path: Path) -> None:
    """The follower needs four steps for what the leader takes in one."""
    settings = {"a": Setting(batch=4), "b": Setting(batch=1, max_lead=1)}
    world = make_world(tmp_path, settings, num_steps=5, save_every=5, eval_every=None)
    world.drive()
    assert world.joint.leader.step == 5
