"""When evals run and what waits for them. Driven by futures: nothing here depends on time."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from paceline.evals.dispatch import EvalDispatcher
from paceline.evals.run import EvalResult
from paceline.evals_settings import EvalsConfig

FAILURES = pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("boom"), "RuntimeError: boom"),
        (asyncio.CancelledError(), "EngineError: was cancelled"),
    ],
)
SETS = [{"name": n, "data": {"path": "x.jsonl"}} for n in ("a", "b")]


class FakeSnapshots:
    """A snapshot is a name; counts who was taken and who was given back."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.retired: list[int] = []
        self.fails_to_take: Exception | None = None
        self.fails_to_retire: Exception | None = None
        self.may_retire = asyncio.Event()
        self.may_retire.set()

    async def take(self, step: int) -> int:
        if self.fails_to_take is not None:
            raise self.fails_to_take
        self.taken.append(step)
        return step

    async def retire(self, snapshot: int) -> None:
        self.retired.append(snapshot)
        await self.may_retire.wait()
        if self.fails_to_retire is not None:
            raise self.fails_to_retire


class FakeEvals:
    """Each point ends when the test says so."""

    def __init__(self) -> None:
        self.started: list[tuple[int, int, int | None]] = []
        self.stopped: list[int] = []
        self.ends: dict[int, asyncio.Future[None]] = {}
        self.begun: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    async def __call__(self, step: int, version: int, snapshot: int | None) -> list[EvalResult]:
        self.started.append((step, version, snapshot))
        self.ends[step] = asyncio.get_running_loop().create_future()
        self.begun[step].set()
        try:
            await self.ends[step]
        except asyncio.CancelledError:
            self.stopped.append(step)
            raise
        return [EvalResult(name, step, version) for name in ("a", "b")]

    async def end(self, step: int, error: BaseException | None = None) -> None:
        """Let a point end and be seen to have ended."""
        await self.begun[step].wait()
        if error is None:
            self.ends[step].set_result(None)
        else:
            self.ends[step].set_exception(error)
        await let_others_run()


async def let_others_run() -> None:
    """Until nothing is left that could go on without us."""
    for _ in range(10):
        await asyncio.sleep(0)


Body = Callable[[EvalDispatcher[int], FakeEvals, FakeSnapshots], Awaitable[None]]


def drive(body: Body, *, background: bool = True, **settings: Any) -> FakeSnapshots:
    """Run the body and close the dispatcher; every snapshot must have been given back once."""
    snapshots = FakeSnapshots()

    async def main() -> None:
        evals = FakeEvals()
        config = EvalsConfig.model_validate({"every": 1, "sets": SETS} | settings)
        dispatcher = EvalDispatcher(config, evals, snapshots if background else None)
        try:
            await body(dispatcher, evals, snapshots)
        finally:
            await dispatcher.aclose()

    asyncio.run(main())
    assert sorted(snapshots.retired) == sorted(snapshots.taken)
    return snapshots


def brief(results: list[EvalResult]) -> list[tuple[str, int, str | None]]:
    return [(r.name, r.step, r.skipped) for r in results]


def both(step: int, reason: str | None = None) -> list[tuple[str, int, str | None]]:
    return [("a", step, reason), ("b", step, reason)]


def test_without_snapshots_the_eval_is_waited_for() -> None:
    async def body(d: EvalDispatcher[int], evals: FakeEvals, _: FakeSnapshots) -> None:
        call = asyncio.create_task(d.dispatch(3, 7))
        await evals.begun[3].wait()
        assert not call.done()
        await evals.end(3)
        assert brief(await call) == both(3)
        assert evals.started == [(3, 7, None)]
        assert await d.drain() == []

    assert drive(body, background=False).taken == []


@FAILURES
def test_without_snapshots_a_failure_is_a_skipped_point(error: BaseException, reason: str) -> None:
    async def body(d: EvalDispatcher[int], evals: FakeEvals, _: FakeSnapshots) -> None:
        call = asyncio.create_task(d.dispatch(3, 7))
        await evals.end(3, error)
        reason = (
            "RuntimeError: boom" if type(error) is RuntimeError else "EngineError: was cancelled"
        )
        assert brief(await call) == both(3, reason)

    drive(body, background=False)


def test_without_snapshots_a_point_that_never_ends_is_stopped() -> None:
    async def body(d: EvalDispatcher[int], evals: FakeEvals, _: FakeSnapshots) -> None:
        found = brief(await d.dispatch(3, 7))
        assert found == both(3, "DeadlineError: took longer than 0.03 s")
        assert evals.stopped == [3]

    drive(body, background=False, timeout_s=0.01)


def test_without_snapshots_our_own_cancellation_goes_through() -> None:
    async def body(d: EvalDispatcher[int], evals: FakeEvals, _: FakeSnapshots) -> None:
        call = asyncio.create_task(d.dispatch(3, 7))
        await evals.begun[3].wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert evals.stopped == [3]

    drive(body, background=False)


def test_with_snapshots_nothing_is_waited_for() -> None:
    async def body(d: EvalDispatcher[int], evals: FakeEvals, snapshots: FakeSnapshots) -> None:
        assert await d.dispatch(1, 10) == []
        assert await d.dispatch(2, 20) == []
        assert d.num_in_flight == 2
        await evals.end(2)
        await evals.end(1)
        assert brief(await d.drain()) == both(1) + both(2)
        assert evals.started == [(1, 10, 1), (2, 20, 2)]
        assert snapshots.retired == [1, 2]

    drive(body)


def test_a_settled_point_comes_with_the_next_call_though_an_older_one_runs_on() -> None:
    async def body(d: EvalDispatcher[int], evals: FakeEvals, snapshots: FakeSnapshots) -> None:
        await d.dispatch(1, 1)
        await d.dispatch(2, 2)
        await evals.end(2)
        assert brief(await d.dispatch(3, 3)) == both(2)
        assert snapshots.retired == [2]
        assert d.num_in_flight == 2

    drive(body)


def test_busy_and_skip_leaves_the_point_out() -> None:
    async def body(d: EvalDispatcher[int], evals: FakeEvals, snapshots: FakeSnapshots) -> None:
        await d.dispatch(1, 1)
        assert brief(await d.dispatch(2, 2)) == both(2, "busy")
        await evals.end(1)
        assert brief(await d.dispatch(3, 3)) == both(1)
        assert snapshots.taken == [1, 3]

    drive(body, on_busy="skip", max_in_flight=1)


@pytest.mark.parametrize("settings", [{"on_busy": "wait"}, {"on_busy": "skip", "force": True}])
def test_busy_and_wait_or_force_holds_until_one_has_ended(settings: dict[str, Any]) -> None:
    force = settings.pop("force", False)

    async def body(d: EvalDispatcher[int], evals: FakeEvals, snapshots: FakeSnapshots) -> None:
        await d.dispatch(1, 1)
        await d.dispatch(2, 2)
        call = asyncio.create_task(d.dispatch(3, 3, force=force))
        await let_others_run()
        assert not call.done()
        assert snapshots.taken == [1, 2]
        await evals.end(2)
        assert brief(await call) == both(2)
        assert snapshots.taken == [1, 2, 3]

    drive(body, max_in_flight=2, **settings)


def test_busy_and_wait_stops_a_point_that_never_ends() -> None:
    async def body(d: EvalDispatcher[int], evals: FakeEvals, snapshots: FakeSnapshots) -> None:
        await d.dispatch(1, 1)
        assert brief(await d.dispatch(2, 2)) == both(1, "EngineError: was cancelled")
        assert evals.stopped == [1]
        assert snapshots.retired == [1]

    drive(body, max_in_flight=1, timeout_s=0.01)


def test_a_snapshot_that_fails_is_a_skipped_point() -> None:
    async def body(d: EvalDispatcher[int], evals: FakeEvals, snapshots: FakeSnapshots) -> None:
        snapshots.fails_to_take = OSError("no memory")
        reason = "snapshot failed: OSError: no memory"
        assert brief(await d.dispatch(1, 1)) == both(1, reason)
        assert d.num_in_flight == 0
        assert evals.started == []

    drive(body)


@FAILURES
def test_an_eval_that_fails_is_a_skipped_point_and_frees_its_snapshot(
    error: BaseException, reason: str
) -> None:
    async def body(d: EvalDispatcher[int], evals: FakeEvals, snapshots: FakeSnapshots) -> None:
        await d.dispatch(1, 1)
        await evals.end(1, error)
        reason = (
            "RuntimeError: boom" if type(error) is RuntimeError else "EngineError: was cancelled"
        )
        assert brief(await d.dispatch(2, 2)) == both(1, reason)
        assert snapshots.retired == [1]

    drive(body)


def test_a_snapshot_that_can_not_be_freed_is_said_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body(d: EvalDispatcher[int], evals: FakeEvals, snapshots: FakeSnapshots) -> None:
        snapshots.fails_to_retire = OSError("stuck")
        await d.dispatch(1, 1)
        await evals.end(1)
        assert brief(await d.drain()) == both(1)

    with caplog.at_level(logging.WARNING):
        drive(body)
    assert "snapshot of step 1 was not freed: OSError: stuck" in caplog.text


def test_drain_stops_what_has_not_ended_by_the_deadline() -> None:
    async def body(d: EvalDispatcher[int], evals: FakeEvals, snapshots: FakeSnapshots) -> None:
        await d.dispatch(1, 1)
        await d.dispatch(2, 2)
        await evals.end(1)
        assert brief(await d.drain(0.0)) == both(1) + both(2, "EngineError: was cancelled")
        assert evals.stopped == [2]
        assert await d.drain() == []

    drive(body)


def test_closing_stops_everything_even_what_has_not_begun() -> None:
    async def body(d: EvalDispatcher[int], evals: FakeEvals, snapshots: FakeSnapshots) -> None:
        await d.dispatch(1, 1)
        await asyncio.sleep(0)
        await d.dispatch(2, 2)
        await d.aclose()
        assert snapshots.retired == [1, 2]
        assert d.num_in_flight == 0

    drive(body)


def test_closing_forgets_a_failure_that_nobody_asked_for() -> None:
    async def body(d: EvalDispatcher[int], evals: FakeEvals, snapshots: FakeSnapshots) -> None:
        await d.dispatch(1, 1)
        await evals.end(1, RuntimeError("late"))
        await d.aclose()

    drive(body)


def test_a_caller_that_is_cancelled_while_waiting_loses_no_snapshot() -> None:
    async def body(d: EvalDispatcher[int], evals: FakeEvals, snapshots: FakeSnapshots) -> None:
        await d.dispatch(1, 1)
        call = asyncio.create_task(d.dispatch(2, 2))
        await let_others_run()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert d.num_in_flight == 1

    drive(body, max_in_flight=1)


def test_a_caller_that_is_cancelled_while_a_snapshot_is_freed_frees_it_once() -> None:
    async def body(d: EvalDispatcher[int], evals: FakeEvals, snapshots: FakeSnapshots) -> None:
        await d.dispatch(1, 1)
        await evals.end(1)
        snapshots.may_retire.clear()
        call = asyncio.create_task(d.drain())
        await let_others_run()
        assert snapshots.retired == [1]
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    drive(body)
