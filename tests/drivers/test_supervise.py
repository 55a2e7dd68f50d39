"""How a run of several tasks ends; for each hazard, next to what a plain supervisor makes of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from drivers.naive import naive_abandon, naive_gather, naive_supervise
from drivers.virtual_time import DeadlockError, LivelockError, run_virtual

from paceline.drivers.gate import Gate
from paceline.drivers.supervise import supervise
from paceline.errors import GateError, SupervisionError

SEEDS = range(30)


async def returns(value: str, seconds: float = 0) -> str:
    await asyncio.sleep(seconds)
    return value


async def raises(error: BaseException, seconds: float = 0) -> str:
    await asyncio.sleep(seconds)
    raise error


async def goes_on() -> None:
    while True:  # noqa: ASYNC110
        await asyncio.sleep(1)


def now() -> float:
    return asyncio.get_running_loop().time()


def notes_of(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


def test_the_leaders_return_is_the_end_and_the_result() -> None:
    async def body() -> None:
        ends: list[str] = []

        async def follow() -> None:
            try:
                await goes_on()
            finally:
                ends.append("follower")

        result = await supervise(
            returns("done", 5),
            {"judge": follow()},
            {"feed": goes_on(), "short feed": returns("no more", 1)},
            on_end=lambda: ends.append("told"),
        )
        assert result == "done"
        assert now() == 5
        assert ends == ["told", "follower"]

    for seed in SEEDS:
        run_virtual(body, seed=seed)


def test_a_leader_alone_is_a_run() -> None:
    assert run_virtual(lambda: supervise(returns("done"), {})) == "done"


def test_a_leader_that_has_nothing_to_do_starts_nobody() -> None:
    async def body() -> None:
        started: list[str] = []

        async def note(name: str) -> None:
            started.append(name)
            await goes_on()

        async def lead() -> str:
            return "nothing to do"

        assert await supervise(lead(), {"a": note("a")}, {"b": note("b")}) == "nothing to do"
        assert started == []
        with pytest.raises(ValueError, match="no model"):
            await supervise(lead_fails(), {"a": note("a")})
        assert started == []

    async def lead_fails() -> None:
        raise ValueError("no model")

    run_virtual(body, shuffle=False)


@pytest.mark.parametrize("kind", ["leader", "follower", "producer"])
def test_the_first_error_wins_and_the_others_are_notes(kind: str) -> None:
    async def fails_late() -> None:
        try:
            await goes_on()
        finally:
            raise OSError("could not close")

    async def body() -> None:
        first = raises(ValueError("loss is nan"), 3)
        works: dict[str, Coroutine[Any, Any, Any]] = {"leader": goes_on(), "follower": goes_on()}
        works |= {"producer": returns("end of data", 1)}
        works[kind].close()
        works[kind] = first
        with pytest.raises(ValueError, match="loss is nan") as caught:
            await supervise(
                works["leader"],
                {"a": works["follower"], "b": fails_late()},
                {"feed": works["producer"]},
            )
        names = {"leader": "the leader", "follower": "follower 'a'", "producer": "producer 'feed'"}
        assert notes_of(caught.value) == [
            f"in {names[kind]}",
            "also, follower 'b': OSError: could not close",
        ]
        assert now() == 3

    for seed in SEEDS:
        run_virtual(body, seed=seed)


@pytest.mark.parametrize("is_first", [True, False])
def test_one_error_that_several_raise_is_told_once(is_first: bool) -> None:
    async def body() -> None:
        gate = Gate(["a", "b"], deadline_s=None)
        shared, own = ValueError("sick"), OSError("disk full")

        async def lead() -> None:
            async with gate.exclusive():
                pass

        async def follow() -> None:
            async with gate.safe_region("a"):
                pass

        async def sicken() -> None:
            await asyncio.sleep(1)
            gate.fail(shared)
            if is_first:
                await goes_on()
            raise own

        with pytest.raises(ValueError if is_first else OSError) as caught:
            await supervise(lead(), {"a": follow(), "b": sicken()})
        assert caught.value is (shared if is_first else own)
        assert len(notes_of(caught.value)) == (1 if is_first else 2)

    for seed in SEEDS:
        run_virtual(body, seed=seed)


def test_H3_a_follower_that_dies_while_the_leader_waits_ends_the_run() -> None:
    async def body(run: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        gate = Gate(["a", "b"], deadline_s=None)

        async def lead() -> None:
            async with gate.exclusive():
                pytest.fail("nobody was at rest")

        async def follow() -> None:
            while True:
                async with gate.safe_region("b"):
                    await asyncio.sleep(1)

        await run(lead(), {"a": raises(ValueError("out of memory"), 2), "b": follow()})

    with pytest.raises(DeadlockError):
        run_virtual(lambda: body(naive_gather))
    for seed in SEEDS:
        with pytest.raises(ValueError, match="out of memory"):
            run_virtual(lambda: body(supervise), seed=seed)


def test_H4_a_follower_that_ends_early_is_an_error_that_names_it() -> None:
    async def body(run: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
        return await run(returns("all steps", 50), {"a": goes_on(), "judge": returns("", 2)})

    assert run_virtual(lambda: body(naive_supervise)) == ""  # a success without the leader's steps
    for seed in SEEDS:
        with pytest.raises(SupervisionError, match="follower 'judge' ended before the run did"):
            run_virtual(lambda: body(supervise), seed=seed)


def test_H6_work_in_other_places_is_over_when_the_run_is() -> None:
    """A publish that is cancelled resumes its engine first, which takes a while."""

    async def body(run: Callable[..., Coroutine[Any, Any, Any]]) -> bool:
        is_paused = False

        async def publish() -> None:
            nonlocal is_paused
            is_paused = True
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(2)
                is_paused = False

        await run(returns("done", 1), {"a": publish()})
        return is_paused

    assert run_virtual(lambda: body(naive_abandon))
    for seed in SEEDS:
        assert not run_virtual(lambda: body(supervise), seed=seed)


class Stubborn:
    """Its backend turns every cancellation into an error of its own, so it tries again."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.has_run_ended = False

    def end(self) -> None:
        self.has_run_ended = True

    async def follow(self) -> None:
        while not self.has_run_ended:
            self.num_steps += 1
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                continue


def test_H7_a_follower_that_swallows_its_cancellation_does_not_hold_up_the_end() -> None:
    async def naively() -> None:
        await naive_supervise(returns("done", 1.5), {"a": Stubborn().follow()})

    with pytest.raises(LivelockError):
        run_virtual(naively, max_callbacks=10_000)

    async def told() -> None:
        stubborn = Stubborn()
        work = {"a": stubborn.follow()}
        assert await supervise(returns("done", 1.5), work, on_end=stubborn.end) == "done"
        assert stubborn.num_steps == 2
        assert now() == 1.5

    async def not_told() -> None:
        stubborn = Stubborn()
        with pytest.raises(SupervisionError) as caught:
            await supervise(returns("done", 1.5), {"a": stubborn.follow()}, grace_s=20)
        assert str(caught.value) == "follower 'a' was cancelled and went on for more than 20 s"
        assert now() == 21.5
        stubborn.end()

    async def after_an_error() -> None:
        stubborn = Stubborn()
        with pytest.raises(ValueError, match="out of memory") as caught:
            await supervise(
                raises(ValueError("out of memory"), 1.5), {"a": stubborn.follow()}, grace_s=20
            )
        assert notes_of(caught.value) == [
            "in the leader",
            "also, follower 'a' was cancelled and went on for more than 20 s",
        ]
        stubborn.end()

    for seed in SEEDS:
        for body in (told, not_told, after_an_error):
            run_virtual(body, seed=seed)


def test_H23_an_error_outranks_a_good_end_of_the_same_moment() -> None:
    async def body(run: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
        return await run(
            returns("done", 2),
            {"a": raises(ValueError("loss is nan"), 2), "b": raises(OSError("disk full"), 2)},
        )

    assert run_virtual(lambda: body(naive_supervise), shuffle=False) == "done"
    with pytest.raises(ValueError, match="loss is nan") as caught:
        run_virtual(lambda: body(supervise), shuffle=False)
    assert notes_of(caught.value)[:2] == [
        "in follower 'a'",
        "also, follower 'b': OSError: disk full",
    ]


def test_H23_the_leaders_end_outranks_a_followers_return_of_the_same_moment() -> None:
    async def body() -> None:
        assert await supervise(returns("done", 2), {"a": returns("", 2)}) == "done"

    run_virtual(body, shuffle=False)


def test_an_error_of_a_task_that_is_being_stopped_is_no_error_of_a_good_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fails_late() -> None:
        try:
            await goes_on()
        finally:
            raise OSError("could not close")

    async def body() -> None:
        assert await supervise(returns("done", 2), {"a": fails_late()}) == "done"

    with caplog.at_level(logging.WARNING):
        run_virtual(body)
    assert "follower 'a': OSError: could not close" in caplog.text


@pytest.mark.parametrize("is_leader", [True, False])
def test_a_task_that_is_cancelled_by_another_hand_fails_the_run(is_leader: bool) -> None:
    async def body() -> None:
        cancelled = raises(asyncio.CancelledError(), 2)
        lead, follow = (cancelled, goes_on()) if is_leader else (goes_on(), cancelled)
        name = "the leader" if is_leader else "follower 'a'"
        with pytest.raises(SupervisionError, match=f"{name} was cancelled while the run went on"):
            await supervise(lead, {"a": follow})

    for seed in SEEDS:
        run_virtual(body, seed=seed)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("num_times", [1, 3])
def test_a_cancelled_run_cancels_all_and_waits_for_them(at: float, num_times: int) -> None:
    """Even if it is cancelled again while it waits."""

    async def body() -> None:
        running: set[str] = set()
        ends: list[str] = []

        async def work(name: str) -> None:
            running.add(name)
            try:
                await goes_on()
            finally:
                await asyncio.sleep(3)
                running.discard(name)

        run = asyncio.create_task(
            supervise(
                work("lead"),
                {"a": work("a")},
                {"feed": work("feed")},
                on_end=lambda: ends.append(""),
            )
        )
        await asyncio.sleep(at)
        await asyncio.sleep(0)
        for _ in range(num_times):
            run.cancel()
            await asyncio.sleep(0.5)
        await asyncio.wait({run})
        assert run.cancelled()
        assert running == set()
        assert len(ends) <= 1
        assert len(ends) == 1 or at == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    for seed in SEEDS:
        run_virtual(body, seed=seed)


def test_a_run_cancelled_while_it_ends_well_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async def slow_end() -> None:
            try:
                await goes_on()
            finally:
                await asyncio.sleep(5)

        run = asyncio.create_task(supervise(returns("done", 1), {"a": slow_end()}))
        await asyncio.sleep(3)
        run.cancel()
        await asyncio.wait({run})
        assert run.cancelled()
        assert now() == 6

    run_virtual(body)


def test_a_cancelled_run_has_a_bounded_end() -> None:
    async def body() -> None:
        stubborn = Stubborn()
        run = asyncio.create_task(supervise(goes_on(), {"a": stubborn.follow()}, grace_s=4))
        await asyncio.sleep(1)
        run.cancel()
        await asyncio.wait({run})
        assert run.cancelled()
        assert now() == 5
        stubborn.end()

    run_virtual(body)


@pytest.mark.parametrize("ends_well", [True, False])
def test_everybody_is_stopped_even_if_on_end_fails(ends_well: bool) -> None:
    async def body() -> None:
        def fail() -> None:
            raise KeyError("no such flag")

        lead = returns("done", 1) if ends_well else raises(ValueError("loss is nan"), 1)
        with pytest.raises(KeyError if ends_well else ValueError):
            await supervise(lead, {"a": goes_on()}, on_end=fail)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(body)


def test_members_of_a_gate_are_stopped_wherever_they_are() -> None:
    """A follower kept at the gate, one in its region and one at work, when the leader ends."""

    async def body() -> None:
        gate = Gate(["kept", "resting", "working"], deadline_s=None)

        async def follow(name: str, inside_s: float) -> None:
            with gate.membership(name):
                async with gate.safe_region(name):
                    await asyncio.sleep(inside_s)
                await asyncio.sleep(1000)

        async def ask() -> None:
            async with gate.exclusive():
                pytest.fail("one was never at rest")

        followers = {"kept": follow("kept", 5), "resting": follow("resting", 1000)}
        followers["working"] = follow("working", 0)
        assert await supervise(returns("done", 10), followers, {"saver": ask_later(ask)}) == "done"
        with pytest.raises(GateError, match="was stopped before its end"):
            async with gate.exclusive():
                pass

    async def ask_later(ask: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await asyncio.sleep(3)
        await ask()

    for seed in SEEDS:
        run_virtual(body, seed=seed)
