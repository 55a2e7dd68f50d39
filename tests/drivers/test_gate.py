"""The gate: its invariants I1 to I8, its errors and its accounts, one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import pytest
from drivers.meetings import gate_of, hold, pass_through, rest, settled
from drivers.virtual_time import run_virtual

from paceline.drivers.gate import Gate
from paceline.errors import GateError


def num_yields(work: Coroutine[Any, Any, Any]) -> int:
    """How often the work gives way to the event loop before it ends; at most once."""
    try:
        work.send(None)
    except StopIteration:
        return 0
    work.close()
    return 1


async def works(gate: Gate, *members: str) -> None:
    """The gate is open, waits for everybody, and opens again."""
    for member in members:
        await rest(gate, member, 0)
    asked = asyncio.create_task(hold(gate))
    await settled()
    assert not gate.is_held
    await asyncio.gather(asked, *(rest(gate, member, 0) for member in members))


def test_I1_an_open_gate_neither_waits_nor_yields() -> None:
    async def body() -> None:
        gate = gate_of("a", "b")
        assert num_yields(pass_through(gate, "a")) == 0

        async def hold_nothing() -> None:
            async with gate.exclusive():
                pass

        async with gate.safe_region("a"), gate.safe_region("b"):
            assert num_yields(hold_nothing()) == 0

    run_virtual(body)


def test_I1_entering_a_region_does_not_wait_for_a_held_gate() -> None:
    async def body() -> None:
        gate = gate_of("a")
        async with gate.safe_region("a"):
            holder = asyncio.create_task(hold(gate, 5))
            await settled()
        assert asyncio.get_running_loop().time() == 5  # only the exit waited
        await holder
        asked = asyncio.create_task(hold(gate, 5))
        await settled()
        assert not gate.is_held
        region = gate.safe_region("a")
        entering = region.__aenter__()
        with pytest.raises(StopIteration):
            entering.send(None)
        assert gate.is_held
        await region.__aexit__(None, None, None)
        assert await asked == 5

    run_virtual(body, shuffle=False)


def test_I2_the_body_runs_only_while_every_member_rests() -> None:
    async def body() -> None:
        gate = gate_of("a", "b")
        asked = asyncio.create_task(hold(gate, 10))
        a = asyncio.create_task(rest(gate, "a", 1))
        await asyncio.sleep(3)
        assert not gate.is_held
        b = asyncio.create_task(rest(gate, "b", 1))
        assert await asked == 3
        assert await a == 13
        assert await b == 13

    run_virtual(body)


def test_I3_a_second_request_does_not_count_members_of_the_first() -> None:
    async def body() -> None:
        gate = gate_of("a")
        trained = 0

        async def member() -> None:
            nonlocal trained
            while True:
                await pass_through(gate, "a")
                await asyncio.sleep(2)
                trained += 1

        task = asyncio.create_task(member())
        for request in range(5):
            assert await hold(gate, 1) >= trained * 2
            assert trained >= request
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    for seed in range(20):
        run_virtual(body, seed=seed)


def test_I3_requests_that_wait_together_let_kept_members_go_in_between() -> None:
    async def body() -> None:
        gate = gate_of("a")
        first = asyncio.create_task(hold(gate, 1))
        second = asyncio.create_task(hold(gate, 1))
        await settled()
        await rest(gate, "a", 0)
        assert first.done()
        assert not gate.is_held
        assert not second.done()
        await asyncio.sleep(3)
        await rest(gate, "a", 0)
        assert await second == 4

    run_virtual(body)


@pytest.mark.parametrize("end", ["return", "raise", "cancel", "limit"])
def test_I4_the_gate_is_released_on_every_way_out_of_the_body(end: str) -> None:
    async def leader(gate: Gate) -> None:
        async with gate.exclusive(limit_s=4 if end == "limit" else None):
            if end == "raise":
                raise ValueError("disk full")
            await asyncio.sleep(5)

    async def body() -> None:
        gate = gate_of("a")
        asked = asyncio.create_task(leader(gate))
        member = asyncio.create_task(rest(gate, "a", 1))
        await asyncio.sleep(3)
        assert member.done() == (end == "raise")
        if end == "cancel":
            asked.cancel()
        (outcome,) = await asyncio.gather(asked, return_exceptions=True)
        kinds = {"raise": ValueError, "cancel": asyncio.CancelledError, "limit": GateError}
        assert isinstance(outcome, kinds.get(end, type(None)))
        await member
        assert not gate.is_held
        await works(gate, "a")

    run_virtual(body)


@pytest.mark.parametrize("end", ["cancel", "deadline"])
def test_I4_a_request_that_is_given_up_lets_kept_members_go(end: str) -> None:
    async def body() -> None:
        gate = gate_of("a", "b", deadline_s=2 if end == "deadline" else None)
        asked = asyncio.create_task(hold(gate, 5))
        kept = asyncio.create_task(rest(gate, "a", 0))
        await asyncio.sleep(1)
        assert not kept.done()
        if end == "cancel":
            asked.cancel()
        (outcome,) = await asyncio.gather(asked, return_exceptions=True)
        assert isinstance(outcome, GateError if end == "deadline" else asyncio.CancelledError)
        assert await kept == (2 if end == "deadline" else 1)
        await works(gate, "a", "b")

    run_virtual(body)


def test_I4_a_request_cancelled_in_the_tick_of_its_grant_holds_nothing() -> None:
    async def body() -> None:
        gate = gate_of("a")
        asked = asyncio.create_task(hold(gate, 5))
        await settled()
        async with gate.safe_region("a"):
            assert gate.is_held
            asked.cancel()
        assert asyncio.get_running_loop().time() == 0
        assert not gate.is_held

    run_virtual(body)


def test_I5_a_kept_member_that_is_cancelled_does_not_count_any_more() -> None:
    async def body() -> None:
        gate = gate_of("a", "b")
        asked = asyncio.create_task(hold(gate))
        kept = asyncio.create_task(rest(gate, "a", 0))
        await asyncio.sleep(2)
        kept.cancel()
        await asyncio.gather(kept, return_exceptions=True)
        assert gate.kept_s("a") == 2
        b = asyncio.create_task(rest(gate, "b", 0))
        await asyncio.sleep(1)
        assert not asked.done()
        gate.leave("a")
        await asyncio.gather(asked, b)

    run_virtual(body)


def test_I6_requests_are_served_one_at_a_time_in_their_order() -> None:
    async def body() -> None:
        gate = gate_of("a", "b")
        order: list[str] = []

        async def ask(name: str) -> None:
            async with gate.exclusive():
                order.append(name)
                await asyncio.sleep(1)
                order.append(name)

        async with gate.safe_region("a"), gate.safe_region("b"):
            asked = []
            for name in ("save", "eval", "save again"):
                asked.append(asyncio.create_task(ask(name)))
                await settled()
            await asyncio.gather(*asked)
        assert order == ["save", "save", "eval", "eval", "save again", "save again"]

    run_virtual(body)


def test_I6_a_member_that_asks_rests_itself() -> None:
    async def body() -> None:
        gate = gate_of("leader", "a")
        by_leader = asyncio.create_task(hold(gate, 3, by="leader"))
        await settled()
        from_outside = asyncio.create_task(hold(gate, 3))
        await asyncio.sleep(1)
        async with gate.safe_region("a"):
            assert await by_leader == 1
            await asyncio.sleep(5)
            assert not from_outside.done()  # the leader has been let go, and works
            await asyncio.gather(rest(gate, "leader", 0), from_outside)
        assert from_outside.result() == 9

    run_virtual(body)


def test_I7_without_members_the_gate_is_open() -> None:
    async def body() -> None:
        assert await hold(gate_of()) == 0

    run_virtual(body)


def test_I8_nobody_waits_for_a_member_that_has_ended() -> None:
    async def body() -> None:
        gate = gate_of("a", "b")
        asked = asyncio.create_task(hold(gate))
        await settled()
        with gate.membership("a"):
            await asyncio.sleep(1)
        with gate.membership("b"):
            kept = asyncio.create_task(rest(gate, "b", 2))
            await kept
        assert await asked == 1
        assert await hold(gate) == 3
        with pytest.raises(GateError, match="'a' can not enter a safe region: it has ended"):
            await pass_through(gate, "a")

    run_virtual(body)


def test_a_failure_reaches_everybody_who_waits_and_everybody_who_comes() -> None:
    async def body() -> None:
        gate = gate_of("a", "b", "c")
        error = ValueError("out of memory")
        waiting = [
            asyncio.create_task(hold(gate)),
            asyncio.create_task(hold(gate)),
            asyncio.create_task(rest(gate, "a", 0)),
            asyncio.create_task(rest(gate, "b", 0)),
        ]
        await settled()
        gate.fail(error)
        gate.fail(KeyError("a later one"))
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(outcome is error for outcome in outcomes)
        for late in (hold(gate), rest(gate, "c", 0)):
            with pytest.raises(ValueError, match="out of memory"):
                await late

    for seed in range(20):
        run_virtual(body, seed=seed)


@pytest.mark.parametrize("end", ["fails", "cancelled"])
def test_half_trained_weights_are_never_at_rest(end: str) -> None:
    async def member(gate: Gate) -> None:
        with gate.membership("a"):
            await asyncio.sleep(1)
            raise ValueError("loss is nan")

    async def body() -> None:
        gate = gate_of("a")
        asked = asyncio.create_task(hold(gate))
        task = asyncio.create_task(member(gate))
        await settled()
        if end == "cancelled":
            task.cancel()
        error = "loss is nan" if end == "fails" else "policy 'a' was stopped before its end"
        with pytest.raises(ValueError if end == "fails" else GateError, match=error):
            await asked
        await asyncio.gather(task, return_exceptions=True)

    run_virtual(body)


def test_an_error_in_a_region_is_not_kept_waiting() -> None:
    async def fail(gate: Gate) -> None:
        async with gate.safe_region("a"):
            await asyncio.sleep(1)
            raise ValueError("no data")

    async def body() -> None:
        gate = gate_of("a")
        holder = asyncio.create_task(hold(gate, 100))
        with pytest.raises(ValueError, match="no data"):
            await fail(gate)
        assert asyncio.get_running_loop().time() == 1
        with pytest.raises(GateError, match="it has broken out of the held gate"):
            await pass_through(gate, "a")
        await holder

    run_virtual(body)


def test_a_member_may_try_again_if_the_gate_was_not_held() -> None:
    async def body() -> None:
        gate = gate_of("a", "b")
        asked = asyncio.create_task(hold(gate))
        await settled()
        with suppress(ValueError):
            async with gate.safe_region("a"):
                raise ValueError
        await asyncio.gather(asked, rest(gate, "a", 0), rest(gate, "b", 0))

    run_virtual(body)


def test_the_deadline_names_who_is_missing_and_reports() -> None:
    async def body() -> None:
        gate = gate_of("a", "b", "c", deadline_s=30, report="b: learning for 99 s")
        gate.leave("c")
        async with gate.safe_region("a"):
            with pytest.raises(GateError) as caught:
                await hold(gate)
        assert str(caught.value) == (
            "waited 30 s for 'b' to come to a point of rest; if a step takes that long, allow more "
            "time. At the gate: 'a' is in a safe region, 'b' works, 'c' has ended.\n"
            "b: learning for 99 s"
        )
        assert gate.waited_s == 30

    run_virtual(body)


def test_the_deadline_counts_the_turns_of_earlier_requests() -> None:
    async def body() -> None:
        gate = gate_of("a", deadline_s=30)
        async with gate.safe_region("a"):
            holder = asyncio.create_task(hold(gate, 50))
            await settled()
            with pytest.raises(GateError, match="waited 30 s for an earlier request to be done"):
                await hold(gate)
            await holder

    run_virtual(body)


def test_a_grant_in_the_moment_of_the_deadline_is_a_grant() -> None:
    async def body() -> bool:
        gate = gate_of("a", deadline_s=2)
        asked = asyncio.create_task(hold(gate))
        await asyncio.sleep(2)
        await rest(gate, "a", 1)
        (outcome,) = await asyncio.gather(asked, return_exceptions=True)
        if isinstance(outcome, GateError):
            assert "waited 2 s for 'a' to come" in str(outcome)
        await works(gate, "a")
        return outcome == 2

    assert {run_virtual(body, seed=seed) for seed in range(50)} == {True, False}


def test_a_timeout_of_the_body_is_its_own() -> None:
    async def body() -> None:
        gate = gate_of()
        with pytest.raises(TimeoutError, match="of the engine"):
            async with gate.exclusive(limit_s=5):
                raise TimeoutError("of the engine")

    run_virtual(body)


@pytest.mark.parametrize("name", ["nobody", "leader"])
def test_names_that_are_no_members_are_refused(name: str) -> None:
    async def body() -> None:
        gate = gate_of("a", "b")
        for wrong in (pass_through(gate, name), hold(gate, by=name)):
            with pytest.raises(GateError, match=f"'{name}' is not a member of the gate.*'a', 'b'"):
                await wrong
        with pytest.raises(GateError, match="not a member"):
            gate.leave(name)

    run_virtual(body)


def test_a_region_inside_a_region_is_refused() -> None:
    async def body() -> None:
        gate = gate_of("a")
        with pytest.raises(GateError, match="it is in a safe region"):
            async with gate.safe_region("a"), gate.safe_region("a"):
                pass
        await pass_through(gate, "a")

    run_virtual(body)
