"""Traps between a leader and its followers, once with a barrier and once with the gate: counts of
who is at rest, data that policies share, the price of a wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from drivers.meetings import Busy, Make, Meeting, WithBarrier, WithGate, ended
from drivers.virtual_time import DeadlockError, run_virtual

# H1


def stale_counts(make: Make, num_followers: int) -> int:
    """Violations over 200 requests that follow each other at once."""
    busy = Busy()

    async def body() -> None:
        names = [f"f{i}" for i in range(num_followers)]
        meeting = make(*names)

        async def follower(name: str) -> None:
            while True:
                await busy.train(0.01)
                await meeting.between_steps(name)

        tasks = [asyncio.create_task(follower(name)) for name in names]
        for _ in range(200):
            await busy.save(meeting, 0.1)
        await ended(*tasks)

    run_virtual(body, check=busy.check, shuffle=False)
    return busy.num_violations


@pytest.mark.parametrize("num_followers", [1, 2, 3])
def test_H1_a_quick_second_request_does_not_count_who_has_not_woken_up(num_followers: int) -> None:
    assert stale_counts(WithBarrier, num_followers) > 100
    assert stale_counts(WithGate, num_followers) == 0


# H2


@dataclass(frozen=True)
class Joint:
    """Two policies that share every episode. needs, step_s: of the leader and of the follower."""

    capacity: int
    needs: tuple[int, int]
    step_s: tuple[float, float]
    save_every: int
    num_steps: int = 60


def leader_slow(capacity: int) -> Joint:
    return Joint(capacity, needs=(4, 4), step_s=(10, 1), save_every=10)


def follower_slow(capacity: int) -> Joint:
    """It takes more data a step as well, so a barrier at every step makes the queues drift."""
    return Joint(capacity, needs=(2, 5), step_s=(1, 10), save_every=1)


def joint_run(make: Make, joint: Joint, seed: int) -> Busy:
    busy = Busy()

    async def body() -> None:
        meeting = make("follower")
        queues: list[asyncio.Queue[int]] = [asyncio.Queue(joint.capacity) for _ in range(2)]

        async def produce() -> None:
            episode = 0
            while True:
                await asyncio.sleep(0.01)
                for queue in queues:
                    await queue.put(episode)
                episode += 1

        async def step(index: int) -> None:
            for _ in range(joint.needs[index]):
                await queues[index].get()

        async def follow() -> None:
            while True:
                async with meeting.waiting("follower"):
                    await step(1)
                await busy.train(joint.step_s[1])
                await meeting.between_steps("follower")

        tasks = [asyncio.create_task(produce()), asyncio.create_task(follow())]
        for number in range(1, joint.num_steps + 1):
            await step(0)
            await busy.train(joint.step_s[0])
            if number % joint.save_every == 0:
                await busy.save(meeting, 0.5)
        await ended(*tasks)

    run_virtual(body, seed=seed, check=busy.check)
    return busy


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", [1, 2, 8, 64])
@pytest.mark.parametrize("setting", [leader_slow, follower_slow])
def test_H2_joint_episodes_in_bounded_queues_do_not_deadlock(
    setting: Callable[[int], Joint], capacity: int, seed: int
) -> None:
    joint = setting(capacity)
    with pytest.raises(DeadlockError):
        joint_run(WithBarrier, joint, seed)
    assert joint_run(WithGate, joint, seed).num_violations == 0


# H5


def cost(make: Make) -> tuple[float, Meeting]:
    """Seconds until a save begins that was asked for while a follower waits 50 s for data."""
    loop = asyncio.get_event_loop
    times: list[float] = []

    async def body() -> Meeting:
        meeting = make("slow", "fast")

        async def follower(name: str, data_s: float) -> None:
            async with meeting.waiting(name):
                await asyncio.sleep(data_s)
            await asyncio.sleep(3)
            await meeting.between_steps(name)

        tasks = [
            asyncio.create_task(follower("slow", 50)),
            asyncio.create_task(follower("fast", 0)),
        ]
        await asyncio.sleep(1)
        async with meeting.alone():
            times.append(loop().time() - 1)
            await asyncio.sleep(4)
        await asyncio.wait(tasks)
        return meeting

    meeting = run_virtual(body)
    return times[0], meeting


def test_H5_a_save_costs_no_wait_for_data_and_every_wait_is_on_the_account() -> None:
    waited_s, _ = cost(WithBarrier)
    assert waited_s == 52
    waited_s, meeting = cost(WithGate)
    assert waited_s == 2
    assert isinstance(meeting, WithGate)
    assert meeting.gate.waited_s == 2
    assert meeting.gate.kept_s("fast") == 4
    assert meeting.gate.kept_s("slow") == 0


def test_H5_the_account_of_a_wait_is_up_to_date_while_it_lasts() -> None:
    async def body() -> None:
        gate = WithGate("a", "b", "c").gate

        async def lead() -> None:
            async with gate.exclusive():
                await asyncio.sleep(10)

        async def follow() -> None:
            async with gate.safe_region("a"):
                pass

        async def rest() -> None:
            async with gate.safe_region("c"):
                await asyncio.sleep(1000)

        works = (lead(), follow(), rest())
        tasks = [asyncio.create_task(work) for work in works]
        await asyncio.sleep(3)
        assert (gate.waited_s, gate.kept_s("a"), gate.kept_s("b")) == (3, 3, 0)
        gate.leave("b")
        await asyncio.sleep(4)
        gate.leave("c")
        assert (gate.waited_s, gate.kept_s("a")) == (3, 7)
        await asyncio.wait(tasks[:2])
        assert (gate.waited_s, gate.kept_s("a"), gate.kept_s("b")) == (3, 13, 0)

    run_virtual(body)
