"""What every worker group does, whichever runtime its processes belong to."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_groups import LocalStarter, Starter, until
from cluster_workers import Probe, die_at_start, hang_at_start, refuse
from reward_workers import has_ended

from paceline.cluster.base import WorkerSpec
from paceline.errors import (
    ConfigError,
    DeadlineError,
    MissingExtraError,
    ResumeMismatchError,
    WorkerError,
)

TRACED = r"(?s)rank 1 of trainer of solver failed: ZeroDivisionError: by zero.*raise ZeroDivision"
ERRORS: list[tuple[str, type[Exception], str]] = [
    ("own", ConfigError, "a key is wrong"),
    ("extra", MissingExtraError, "this needs the package 'thing'"),
    ("resume", ResumeMismatchError, "another model"),
    ("exit", WorkerError, "SystemExit: 3"),
    ("other", WorkerError, TRACED),
]


def spec(size: int = 2, **arguments: Any) -> WorkerSpec:
    return WorkerSpec("trainer of solver", Probe, arguments, size=size)


def with_group(
    starter: Starter,
    body: Callable[[Any], Awaitable[None]],
    own: WorkerSpec | None = None,
    **limits: float,
) -> None:
    """Run the body with a group, which is closed after it; all processes must be gone then."""

    async def run() -> None:
        async with AsyncExitStack() as stack:
            group = await starter.start(stack, own or spec(), **limits)
            pids = [pid for _, pid in await group.call("whoami")]
            await body(group)
        assert all(has_ended(pid) for pid in pids)

    asyncio.run(run())


def test_ranks_know_their_place(starter: Starter) -> None:
    async def body(group: Any) -> None:
        found = await group.call("whoami")
        ranks = [rank for rank, _ in found]
        assert [rank.index for rank in ranks] == [0, 1]
        assert {(r.size, r.address, r.port, r.device) for r in ranks} == {
            (2, ranks[0].host, ranks[0].port, "cpu")
        }
        assert len({pid for _, pid in found} | {os.getpid()}) == 3
        assert group.size == 2

    with_group(starter, body)


def test_arguments_and_results_travel(local: LocalStarter) -> None:
    async def body(group: Any) -> None:
        assert await group.call("scaled", 5) == [15, 15]
        assert await group.scatter("scaled", [(1,), (2,)]) == [3, 6]
        assert await group.call("later", {"a": (1, 2)}) == [{"a": (1, 2)}] * 2
        with pytest.raises(ValueError, match="1 sets of arguments for 2 ranks"):
            await group.scatter("scaled", [(1,)])

    with_group(local, body, spec(scale=3))


@pytest.mark.parametrize("size", [1000, 40 * 2**20])
def test_arrays_of_any_size_travel_and_can_be_written(starter: Starter, size: int) -> None:
    async def body(group: Any) -> None:
        values = np.arange(size, dtype=np.uint8)
        for _ in range(2):
            for result in await group.call("add_one", values):
                np.testing.assert_array_equal(result, np.arange(1, size + 1, dtype=np.uint8))
                result += 1
        assert values[1] == 1

    with_group(starter, body)


def test_a_value_from_a_function_of_the_caller_travels(local: LocalStarter) -> None:
    async def body(group: Any) -> None:
        assert await group.call("echo", (b"x" * 100, None)) == [(b"x" * 100, None)] * 2

    with_group(local, body)


def test_an_error_is_raised_as_what_it_was_and_the_group_goes_on(starter: Starter) -> None:
    async def body(group: Any) -> None:
        for kind, error, message in ERRORS:
            with pytest.raises(error, match=message) as caught:
                await group.call("fail", kind, 1)
            if error is not WorkerError:
                assert "raised in rank 1 of trainer of solver" in caught.value.__notes__
            assert await group.call("scaled", 2) == [2, 2]

    with_group(starter, body)


@pytest.mark.parametrize("method", ["nothing", "_private", "rank", "__init__"])
def test_only_public_methods_are_called(local: LocalStarter, method: str) -> None:
    async def body(group: Any) -> None:
        with pytest.raises(WorkerError, match=f"Probe has no method {method!r}"):
            await group.call(method)

    with_group(local, body)


def test_what_can_not_be_pickled_is_said_and_costs_that_call_only(starter: Starter) -> None:
    async def body(group: Any) -> None:
        with pytest.raises(WorkerError, match="an argument of echo can not be sent to the workers"):
            await group.call("echo", threading.Lock())
        with pytest.raises(WorkerError, match=r"result .Unpicklable. can not be sent"):
            await group.call("unpicklable")
        with pytest.raises(WorkerError, match=r"can not be read by the driver.*no such thing here"):
            await group.call("breaks_on_arrival")
        assert await group.call("calls") == [0, 0]

    with_group(starter, body)


@pytest.mark.parametrize(
    ("how", "words"),
    [("kill", "was killed by SIGKILL during die; the machine"), ("exit", "exit code 7 during die")],
)
def test_a_rank_that_dies_is_told_with_its_last_output(
    starter: Starter, how: str, words: str
) -> None:
    async def body(group: Any) -> None:
        with pytest.raises(
            WorkerError, match=r"(?s)rank 1 of trainer of solver .*during die"
        ) as caught:
            await group.call("die", 1, how)
        assert starter.tells(str(caught.value), words)
        assert "about to go" in str(caught.value)
        with pytest.raises(WorkerError, match=r"trainer of solver has ended: rank 1 of"):
            await group.call("scaled", 2)

    with_group(starter, body)


def test_ranks_that_wait_for_a_dead_one_are_ended(starter: Starter) -> None:
    async def body(group: Any) -> None:
        pids = [pid for _, pid in await group.call("whoami")]
        with pytest.raises(WorkerError, match=r"rank 0 of") as caught:
            await group.call("die_others_wait", 0)
        assert any("rank 1 did not end" in note for note in caught.value.__notes__)
        assert all(has_ended(pid) for pid in pids)

    with_group(starter, body)


def test_ranks_that_wait_for_a_failed_one_are_ended_and_the_cause_is_raised(
    local: LocalStarter,
) -> None:
    async def body(group: Any) -> None:
        with pytest.raises(ConfigError, match="the cause"):
            await group.call("fail_others_wait", 1)
        with pytest.raises(WorkerError, match="has ended: the cause"):
            await group.call("scaled", 2)

    with_group(local, body)


def test_a_rank_that_died_between_calls_is_told_at_the_next(starter: Starter) -> None:
    async def body(group: Any) -> None:
        pids = [pid for _, pid in await group.call("whoami")]
        os.kill(pids[0], 9)
        assert has_ended(pids[0])
        with pytest.raises(WorkerError, match="rank 0 of trainer of solver"):
            await group.call("scaled", 2)

    with_group(starter, body)


def test_a_rank_that_hangs_is_ended_at_the_limit_and_shows_where_it_hung(starter: Starter) -> None:
    async def body(group: Any) -> None:
        with pytest.raises(
            DeadlineError, match=r"(?s)took longer than 2 s on rank 1.*sleep_on_purpose"
        ):
            await group.call("hang", 1)

    with_group(starter, body, call_s=2.0)


def test_a_cancelled_call_may_come_to_its_end_and_the_group_goes_on(
    local: LocalStarter, tmp_path: Path
) -> None:
    async def body(group: Any) -> None:
        call = asyncio.ensure_future(group.call("wait_for", str(tmp_path / "go")))
        await until(lambda: len(list(tmp_path.glob("go.waiting-*"))) == 2)
        call.cancel()
        await asyncio.sleep(0)
        (tmp_path / "go").touch()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await group.call("scaled", 2) == [2, 2]

    with_group(local, body, cancel_s=30.0)


def test_a_cancelled_call_that_does_not_end_is_ended(starter: Starter, tmp_path: Path) -> None:
    async def body(group: Any) -> None:
        pids = [pid for _, pid in await group.call("whoami")]
        call = asyncio.ensure_future(group.call("wait_for", str(tmp_path / "never")))
        await until(lambda: len(list(tmp_path.glob("never.waiting-*"))) == 2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert all(has_ended(pid) for pid in pids)
        with pytest.raises(WorkerError, match="was cancelled and did not end"):
            await group.call("scaled", 2)

    with_group(starter, body)


def test_calls_of_several_tasks_run_in_order(local: LocalStarter) -> None:
    async def body(group: Any) -> None:
        results = await asyncio.gather(*(group.call("echo", i) for i in range(20)))
        assert results == [[i, i] for i in range(20)]

    with_group(local, body)


def test_environment_reaches_the_workers(starter: Starter) -> None:
    async def body(group: Any) -> None:
        names = ("OWN", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "OF_ALL")
        assert await group.call("environment", *names) == [["yes", "3", "", "given"]] * 2

    own = WorkerSpec("w", Probe, {}, size=2, threads=3, env={"OWN": "yes"})
    with_group(starter, body, own)


def test_a_start_that_fails_raises_its_error_and_leaves_nothing(local: LocalStarter) -> None:
    async def run(own: WorkerSpec, **limits: float) -> None:
        async with AsyncExitStack() as stack:
            await local.start(stack, own, **limits)

    with pytest.raises(ConfigError, match="this can not be made"):
        asyncio.run(run(WorkerSpec("a", refuse, size=2)))
    with pytest.raises(WorkerError, match=r"(?s)during its start.*out of luck"):
        asyncio.run(run(WorkerSpec("b", die_at_start, size=2)))
    with pytest.raises(
        DeadlineError, match=r"(?s)its start of c took longer than 3 s.*hang_at_start"
    ):
        asyncio.run(run(WorkerSpec("c", hang_at_start, size=2), start_s=3.0))
    with pytest.raises(WorkerError, match="can not be sent"):
        asyncio.run(run(WorkerSpec("d", Probe, {"scale": threading.Lock()})))
    assert local.leftovers() == []


def test_close_asks_the_objects_first_and_can_be_repeated(starter: Starter, tmp_path: Path) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            group = await starter.start(stack, spec(folder=str(tmp_path)))
            await group.aclose()
            assert {path.name for path in tmp_path.iterdir()} == {"closed-0", "closed-1"}
            await group.aclose()
            with pytest.raises(WorkerError, match="trainer of solver was closed"):
                await group.call("scaled", 2)

    asyncio.run(run())


def test_close_ends_a_call_that_runs(local: LocalStarter) -> None:
    async def body(group: Any) -> None:
        call = asyncio.ensure_future(group.call("hang", 0))
        await until(lambda: group.is_busy)
        await group.aclose()
        with pytest.raises(WorkerError):
            await call

    with_group(local, body)
