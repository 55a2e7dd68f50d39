"""Traps inside a save or an eval, and of who may ask for one, with a barrier and with the gate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from drivers.meetings import Busy, Make, Meeting, WithBarrier, WithGate, ended
from drivers.naive import NaiveRegions, naive_settle
from drivers.virtual_time import DeadlockError, run_virtual

from paceline.drivers.board import Board
from paceline.drivers.gate import Gate
from paceline.drivers.supervise import settle
from paceline.errors import GateError

# H8, H9, H10


def cut_save(make: Make) -> None:
    """A save is cancelled in the middle; the follower has to come through all the same."""

    async def body() -> None:
        meeting = make("follower")
        saving = asyncio.create_task(Busy().save(meeting, 100))
        await asyncio.sleep(1)
        follower = asyncio.create_task(meeting.between_steps("follower"))
        await asyncio.sleep(1)
        saving.cancel()
        await follower

    run_virtual(body)


def test_H8_a_save_that_is_cancelled_opens_the_gate() -> None:
    with pytest.raises(DeadlockError):
        cut_save(WithBarrier)
    cut_save(WithGate)


@pytest.mark.parametrize("is_naive", [True, False])
def test_H9_a_failed_save_does_not_open_the_gate_under_the_saves_of_others(is_naive: bool) -> None:
    writing: set[str] = set()
    seen: list[set[str]] = []

    async def write(name: str, seconds: float, error: str | None = None) -> None:
        writing.add(name)
        await asyncio.sleep(seconds)
        writing.discard(name)
        if error is not None:
            raise OSError(error)

    async def body() -> None:
        meeting = WithGate("b", "c")

        async def follower(name: str) -> None:
            await meeting.between_steps(name)
            seen.append(set(writing))

        tasks = [asyncio.create_task(follower(name)) for name in "bc"]
        works = {
            "a": write("a", 1, "disk full"),
            "b": write("b", 5),
            "c": write("c", 3, "quota"),
        }
        with pytest.raises(OSError, match="disk full") as caught:
            async with meeting.alone():
                await (naive_settle if is_naive else settle)(works)
        await asyncio.wait(tasks)
        notes = ["in the work of 'a'", "also, the work of 'c': OSError: quota"]
        assert getattr(caught.value, "__notes__", []) == ([] if is_naive else notes)
        await asyncio.sleep(10)

    run_virtual(body, shuffle=False)
    assert seen == ([{"b", "c"}] * 2 if is_naive else [set(), set()])


def test_H9_a_cancelled_save_is_waited_for() -> None:
    """It may take a while to come to a halt; only then may anything else touch the files."""
    halted: list[float] = []

    async def write() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(2)
            halted.append(asyncio.get_running_loop().time())

    async def body() -> None:
        saving = asyncio.create_task(settle({"a": write(), "b": write()}))
        await asyncio.sleep(1)
        saving.cancel()
        await asyncio.wait({saving})
        assert saving.cancelled()
        assert halted == [3, 3]

    run_virtual(body)


def two_requests(make_save: Make, make_eval: Make | None) -> None:
    """A save and an eval at the same time, from two tasks; two followers come to both points."""

    async def body() -> None:
        save = make_save("a", "b")
        evaluate = save if make_eval is None else make_eval("a", "b")

        async def follower(name: str, first: Meeting, second: Meeting) -> None:
            while True:
                await asyncio.sleep(1)
                await first.between_steps(name)
                await second.between_steps(name)

        tasks = [
            asyncio.create_task(follower("a", save, evaluate)),
            asyncio.create_task(follower("b", evaluate, save)),
        ]
        await asyncio.gather(Busy().save(save, 1), Busy().save(evaluate, 1))
        await ended(*tasks)

    run_virtual(body)


def test_H10_a_save_and_an_eval_do_not_wait_for_each_other() -> None:
    with pytest.raises(DeadlockError):
        two_requests(WithBarrier, WithBarrier)
    two_requests(WithGate, None)


# H21, H22


def sick_eval(meeting: Meeting) -> asyncio.Task[None]:
    async def evaluate() -> None:
        async with meeting.alone():
            await asyncio.get_running_loop().create_future()

    return asyncio.create_task(evaluate())


def test_H21_an_eval_on_a_sick_engine_does_not_keep_everybody_for_ever() -> None:
    async def with_barrier() -> None:
        meeting = WithBarrier("follower")
        task = sick_eval(meeting)
        await asyncio.sleep(1)
        await meeting.between_steps("follower")
        await ended(task)

    with pytest.raises(DeadlockError):
        run_virtual(with_barrier)

    async def with_gate() -> None:
        clock = asyncio.get_running_loop().time
        board = Board(["solver", "judge"], "solver", clock)
        board.enter("solver", "evaluating")
        gate = Gate(["judge"], deadline_s=None, report=board.report, clock=clock)

        async def evaluate() -> None:
            async with gate.exclusive(limit_s=60):
                await asyncio.get_running_loop().create_future()

        task = asyncio.create_task(evaluate())
        await asyncio.sleep(1)
        async with gate.safe_region("judge"):
            pass
        assert gate.kept_s("judge") == 60
        with pytest.raises(GateError, match=r"held for more than 60 s.*'judge'") as caught:
            await task
        assert "solver (leader): evaluating for 61.0 s" in str(caught.value)

    run_virtual(with_gate)


def test_H21_a_member_that_hangs_is_named_at_the_deadline() -> None:
    async def body(make: Make, **options: Any) -> None:
        meeting = make("solver", "judge", **options)
        hung = asyncio.create_task(asyncio.Event().wait())
        kept = asyncio.create_task(meeting.between_steps("solver"))
        async with meeting.alone():
            pass
        await ended(hung, kept)

    with pytest.raises(DeadlockError):
        run_virtual(lambda: body(WithBarrier))
    with pytest.raises(GateError, match="waited 600 s for 'judge' to come to a point of rest"):
        run_virtual(lambda: body(WithGate, deadline_s=600))


def test_H22_a_leader_without_data_does_not_keep_others_from_saving() -> None:
    """With a barrier only the leader can save, and it is not there to be asked."""

    async def with_barrier() -> None:
        request, no_data = asyncio.Event(), asyncio.Event()
        meeting = WithBarrier("follower")

        async def lead() -> None:
            await no_data.wait()
            if request.is_set():
                await Busy().save(meeting, 1)

        request.set()
        await lead()

    with pytest.raises(DeadlockError):
        run_virtual(with_barrier)

    async def with_gate() -> None:
        gate = WithGate("leader", "follower").gate
        no_data = asyncio.Event()
        leader_steps = 0

        async def lead() -> None:
            nonlocal leader_steps
            async with gate.safe_region("leader"):
                await no_data.wait()
            leader_steps += 1

        async def follow() -> None:
            while True:
                await asyncio.sleep(1)
                async with gate.safe_region("follower"):
                    await asyncio.sleep(0)

        tasks = [asyncio.create_task(lead()), asyncio.create_task(follow())]
        await asyncio.sleep(10.5)
        async with gate.exclusive():
            no_data.set()
            await asyncio.sleep(5)
            assert leader_steps == 0
        await asyncio.sleep(0.1)
        assert leader_steps == 1
        await ended(*tasks)

    run_virtual(with_gate)


def hop(make: Callable[[], Any]) -> float:
    """Two followers, one of which always works; returns the leader's wait, 1000 if it gave up."""

    async def body() -> float:
        regions = make()

        async def follower(name: str, first_s: float) -> None:
            await asyncio.sleep(first_s)
            while True:
                async with regions.safe_region(name):
                    await asyncio.sleep(1)
                await asyncio.sleep(1.5)

        tasks = [asyncio.create_task(follower("a", 0)), asyncio.create_task(follower("b", 1.25))]
        await asyncio.sleep(4)
        try:
            async with asyncio.timeout(1000), regions.exclusive():
                waited_s = asyncio.get_running_loop().time() - 4
        except TimeoutError:
            waited_s = 1000
        await ended(*tasks)
        return waited_s

    return run_virtual(body)


def test_H22_followers_that_hop_from_region_to_region_do_not_starve_the_leader() -> None:
    assert hop(lambda: NaiveRegions({"a", "b"})) == 1000
    assert hop(lambda: WithGate("a", "b").gate) <= 1.5
