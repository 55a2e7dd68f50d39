"""An engine of several replicas, all of them fakes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from engines.replicas import FakeReplica, FakeSource, FakeSupplier, plan, refused

from paceline.engines.base import Completion, CutSignal, Request, Sampling
from paceline.engines.http import LostServerError
from paceline.engines.router import RoutedEngine
from paceline.errors import EngineError, WeightError
from paceline.weights.base import WeightPlan

Scenario = Callable[[RoutedEngine, list[FakeSupplier]], Awaitable[None]]


def with_engine(
    scenario: Scenario,
    count: int = 3,
    *,
    manual: bool = False,
    is_ours: bool = True,
    **options: Any,
) -> None:
    async def main() -> None:
        suppliers = [FakeSupplier(i, manual=manual, is_ours=is_ours) for i in range(count)]
        options.setdefault("watch_s", 0.02)
        engine = RoutedEngine(suppliers, policy="policy", **options)
        async with asyncio.timeout(20):
            await engine.open()
            try:
                await scenario(engine, suppliers)
            finally:
                await engine.aclose()
        assert all(supplier.is_stopped for supplier in suppliers)

    asyncio.run(main())


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engines.router.FIRST_PAUSE_S", 0.01)


def request(group: str = "", **changes: Any) -> Request:
    return Request(tokens=[5, 6], sampling=Sampling(), seed=1, group=group, **changes)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


def loads(suppliers: list[FakeSupplier]) -> list[int]:
    return [len(supplier.replica.requests) for supplier in suppliers]


def ask(engine: RoutedEngine, count: int, group: str = "") -> list[asyncio.Task[Completion]]:
    return [asyncio.create_task(engine.generate(request(group))) for _ in range(count)]


async def release(suppliers: list[FakeSupplier], tasks: list[asyncio.Task[Completion]]) -> None:
    while not all(task.done() for task in tasks):
        for supplier in suppliers:
            supplier.replica.release()
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)


def test_requests_go_to_the_idlest_replica() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        tasks = ask(engine, 7)
        await settle()
        assert sorted(loads(suppliers)) == [2, 2, 3]
        suppliers[1].replica.release()
        await settle()
        tasks += ask(engine, 2)
        await settle()
        assert engine.num_running == 7 + 2 - loads(suppliers)[1] + 2
        await release(suppliers, tasks)
        assert engine.num_running == 0

    with_engine(scenario, manual=True)


def test_requests_one_after_another_are_spread_too() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        for _ in range(9):
            await engine.generate(request())
        assert loads(suppliers) == [3, 3, 3]

    with_engine(scenario)


def test_a_group_stays_together_unless_its_replica_is_far_behind() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        tasks = [t for g in range(6) for t in ask(engine, 8, f"group {g}")]
        await settle()
        assert loads(suppliers) == [16, 16, 16]
        for supplier in suppliers:
            groups = Counter(r.group for r in supplier.replica.requests)
            assert list(groups.values()) == [8, 8]
        await release(suppliers, tasks)
        many = ask(engine, 40, "group 0")
        await settle()
        new = [n - 16 for n in loads(suppliers)]
        assert max(new) > 16
        assert min(new) > 0
        await release(suppliers, many)

    with_engine(scenario, manual=True)


def test_a_lost_request_is_asked_of_another_replica() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        tasks = ask(engine, 6)
        await settle()
        suppliers[0].may_start.clear()
        suppliers[0].replica.kill()
        await until(lambda: engine.num_serving == 2)
        await settle()
        assert loads(suppliers)[1:] == [3, 3]
        await release(suppliers[1:], tasks)

    with_engine(scenario, manual=True)


def test_a_request_that_no_replica_answers_fails_alone() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        for supplier in suppliers:
            supplier.replica.fail = LostServerError("status 500")
        with pytest.raises(EngineError, match=r"3 attempts \(engine.retries = 2\)") as caught:
            await engine.generate(request())
        assert caught.value.__cause__ is None
        assert loads(suppliers) == [1, 1, 1]
        assert engine.num_serving == 3

    with_engine(scenario)


def test_a_refusal_is_not_tried_again() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        for supplier in suppliers:
            supplier.replica.fail = EngineError("too long")
        with pytest.raises(EngineError, match="too long"):
            await engine.generate(request())
        assert sum(loads(suppliers)) == 1

    with_engine(scenario)


def test_a_replica_that_fails_again_and_again_is_taken_out() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        bad = suppliers[0].replica
        bad.fail = LostServerError("status 500")
        bad.check = lambda: _raise(LostServerError("status 500"))  # type: ignore[method-assign]
        for _ in range(9):
            await engine.generate(request())
        assert engine.num_serving == 2
        assert len(bad.requests) <= 3

    with_engine(scenario, watch_s=60)


async def _raise(error: Exception) -> None:
    raise error


def test_a_dead_server_is_started_again_and_serves_if_its_weights_are_right() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        suppliers[0].replica.kill()
        await until(lambda: len(suppliers[0].started) == 2 and engine.num_serving == 3)
        for _ in range(6):
            await engine.generate(request())
        assert loads(suppliers)[0] > 0

    with_engine(scenario)


def test_a_dead_server_waits_for_the_next_publish_if_its_weights_are_old() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        await engine.receive(plan(1))
        suppliers[0].replica.kill()
        await until(lambda: len(suppliers[0].started) == 2)
        await settle()
        assert engine.num_serving == 2
        made = [await engine.generate(request()) for _ in range(6)]
        assert {v for m in made for v in m.versions} == {1}
        assert loads(suppliers)[0] == 0
        await engine.receive(plan(2))
        assert engine.num_serving == 3
        made = [await engine.generate(request()) for _ in range(6)]
        assert {v for m in made for v in m.versions} == {2}
        assert loads(suppliers)[0] > 0

    with_engine(scenario)


def test_one_that_was_lost_for_a_moment_serves_again_if_it_holds_the_version() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        await engine.receive(plan(1))
        first = suppliers[0].replica
        first.is_there = False
        await until(lambda: engine.num_serving == 1)
        first.is_there = True
        await until(lambda: engine.num_serving == 2)
        first.is_there = False
        await until(lambda: engine.num_serving == 1)
        await engine.receive(plan(2))
        first.is_there = True
        await until(lambda: "version" in [c[0] for c in first.weights.calls[-1:]])
        await settle()
        assert engine.num_serving == 1
        assert len(suppliers[0].started) == 1

    with_engine(scenario, 2, is_ours=False)


def test_requests_wait_where_the_only_replica_comes_back() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        tasks = ask(engine, 3)
        await settle()
        suppliers[0].may_start.clear()
        suppliers[0].replica.kill()
        suppliers[0].manual = False
        await until(lambda: engine.num_serving == 0)
        await settle()
        assert not any(task.done() for task in tasks)
        suppliers[0].may_start.set()
        assert len(await asyncio.gather(*tasks)) == 3

    with_engine(scenario, 1, manual=True)


def test_all_requests_fail_at_once_where_none_can_come_back() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        await engine.receive(plan(1))
        tasks = ask(engine, 3)
        await settle()
        suppliers[0].replica.kill()
        for task in tasks:
            with pytest.raises(EngineError, match="no replica of policy 'policy' serves") as caught:
                await task
            assert isinstance(caught.value.__cause__, EngineError)

    with_engine(scenario, 1, manual=True)


def test_a_server_that_does_not_come_up_is_given_up() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        suppliers[0].fail = EngineError("out of memory")
        suppliers[0].replica.kill()
        with pytest.raises(EngineError, match="out of memory"):
            await engine.generate(request())

    with_engine(scenario, 1)


def test_opening_fails_with_the_first_reason_and_ends_all() -> None:
    async def main() -> None:
        suppliers = [FakeSupplier(i) for i in range(3)]
        suppliers[1].fail = EngineError("ended with 1: no such model")
        engine = RoutedEngine(suppliers, policy="policy")
        with pytest.raises(EngineError, match="no such model"):
            await engine.open()
        assert all(supplier.is_stopped for supplier in suppliers)

    asyncio.run(main())


def test_finish_waits_for_what_runs_and_holds_what_comes() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        before = ask(engine, 4)
        await settle()
        pause = asyncio.create_task(engine.pause("finish"))
        await settle()
        later = ask(engine, 2)
        await settle()
        assert engine.num_running == 4
        assert not pause.done()
        await release(suppliers, before)
        await pause
        assert [s.replica.calls[-1] for s in suppliers] == ["pause finish"] * 3
        assert not any(task.done() for task in later)
        await engine.resume()
        await settle()
        assert engine.num_running == 2
        await release(suppliers, later)

    with_engine(scenario, manual=True)


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
def test_other_pauses_do_not_wait(mode: Any) -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        running = ask(engine, 4)
        await settle()
        await engine.pause(mode)
        await engine.pause("finish")
        assert engine.num_running == 4
        assert [s.replica.calls[-1] for s in suppliers] == [f"pause {mode}"] * 3
        await engine.receive(plan(1))
        await engine.resume()
        await release(suppliers, running)

    with_engine(scenario, manual=True)


def test_resuming_ends_a_pause_that_still_waits() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        running = ask(engine, 1)
        await settle()
        pause = asyncio.create_task(engine.pause("finish"))
        await settle()
        await engine.resume()
        with pytest.raises(EngineError, match="resumed before it had come to rest"):
            await pause
        await release(suppliers, running)

    with_engine(scenario, manual=True)


def test_a_cut_ends_requests_that_wait() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        await engine.pause("keep")
        cut = CutSignal()
        waiting = asyncio.create_task(engine.generate(request(cut=cut)))
        other = asyncio.create_task(engine.generate(request()))
        await settle()
        cut.set()
        assert await waiting == Completion([], [], [], "length")
        assert not other.done()
        await engine.resume()
        await other

    with_engine(scenario)


def test_a_replica_that_comes_back_during_a_pause_is_paused() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        await engine.pause("finish")
        suppliers[0].replica.kill()
        await until(lambda: len(suppliers[0].started) == 2 and engine.num_serving == 3)
        assert suppliers[0].replica.calls == ["pause recompute"]
        await engine.resume()
        assert suppliers[0].replica.calls[-1] == "resume"

    with_engine(scenario)


def test_sleeping_and_waking() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        await engine.sleep(frozenset({"kv_cache"}))
        await engine.sleep(frozenset({"kv_cache", "weights"}))
        with pytest.raises(EngineError, match=r"asleep \(kv_cache, weights\)"):
            await engine.generate(request())
        with pytest.raises(WeightError, match="weights are asleep"):
            await engine.receive(plan(1))
        await engine.wake(frozenset({"weights"}))
        await engine.wake(frozenset({"weights", "graphs"}))
        await engine.receive(plan(1))
        with pytest.raises(EngineError, match=r"asleep \(kv_cache\)"):
            await engine.generate(request())
        await engine.wake(frozenset({"kv_cache"}))
        assert (await engine.generate(request())).versions == [1]
        calls = [c for c in suppliers[0].replica.calls if c != "resume"]
        assert calls == [
            "sleep kv_cache", "sleep weights", "wake weights", "wake ", "wake kv_cache"
        ]  # fmt: skip

    with_engine(scenario)


def test_dropped_weights_must_come_anew() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        await engine.sleep(frozenset({"weights"}))
        await engine.wake(frozenset({"weights"}))
        with pytest.raises(EngineError, match="none were received since"):
            await engine.generate(request())
        await engine.receive(plan(1))
        await engine.generate(request())

    with_engine(scenario)


def test_frozen_requests_give_up_their_cache_before_it_sleeps() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        running = ask(engine, 3)
        await settle()
        with pytest.raises(EngineError, match="pause it first"):
            await engine.sleep(frozenset({"kv_cache"}))
        await engine.pause("keep")
        await engine.sleep(frozenset({"kv_cache"}))
        assert suppliers[0].replica.calls[-2:] == ["pause recompute", "sleep kv_cache"]
        suppliers[0].replica.calls.clear()
        await engine.resume()
        assert not suppliers[0].replica.calls
        await engine.wake(frozenset({"kv_cache"}))
        assert suppliers[0].replica.calls == ["wake kv_cache", "resume"]
        await release(suppliers, running)

    with_engine(scenario, manual=True)


def test_servers_are_not_started_while_the_engine_sleeps() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        await engine.sleep(frozenset({"kv_cache"}))
        suppliers[0].replica.kill()
        await until(lambda: engine.num_serving == 2)
        await asyncio.sleep(0.1)  # several looks at the fleet
        assert len(suppliers[0].started) == 1
        await engine.wake(frozenset({"kv_cache"}))
        await until(lambda: len(suppliers[0].started) == 2)

    with_engine(scenario)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (WeightPlan("other", 1, "handles", source=FakeSource()), "policy 'other' were sent"),
        (WeightPlan("policy", 1, "shared"), "by transport 'shared'"),
        (WeightPlan("policy", 1, "disk"), "has no source"),
    ],
)
def test_plans_that_are_not_for_it(wrong: WeightPlan, said: str) -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        with pytest.raises(WeightError, match=said):
            await engine.receive(wrong)

    with_engine(scenario)


def test_a_refused_publish_leaves_the_version_as_it_was() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        await engine.pause("finish")
        suppliers[1].replica.weights.fail["take"] = refused()
        with pytest.raises(WeightError, match="the server refused"):
            await engine.receive(plan(1))
        assert engine.version == 0
        del suppliers[1].replica.weights.fail["take"]
        await engine.receive(plan(2))
        await engine.resume()
        assert engine.version == 2
        assert engine.num_serving == 3

    with_engine(scenario)


def test_a_replica_that_is_lost_in_a_publish_does_not_serve() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        await engine.pause("finish")
        suppliers[1].replica.weights.fail["take"] = LostServerError("gone", is_cut_off=True)
        await engine.receive(plan(1))
        await engine.resume()
        await settle()
        assert engine.version == 1
        made = [await engine.generate(request()) for _ in range(6)]
        assert {v for m in made for v in m.versions} == {1}
        assert not suppliers[1].replica.requests

    with_engine(scenario, watch_s=60)


def test_closing_fails_what_waits() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        await engine.pause("keep")
        waiting = ask(engine, 2)
        await settle()
        await engine.aclose()
        for task in waiting:
            with pytest.raises(EngineError, match="the engine is closed"):
                await task
        with pytest.raises(EngineError, match="the engine is closed"):
            await engine.score([5])

    with_engine(scenario)


def test_cancelled_requests_free_their_place() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        tasks = ask(engine, 5)
        await settle()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert engine.num_running == 0
        await engine.pause("finish")

    with_engine(scenario, manual=True)


def test_a_thousand_replicas_are_chosen_among_quickly() -> None:
    async def scenario(engine: RoutedEngine, suppliers: list[FakeSupplier]) -> None:
        tasks = ask(engine, 5000)
        await settle()
        assert set(loads(suppliers)) == {5}
        await release(suppliers, tasks)
        assert isinstance(suppliers[0].replica, FakeReplica)

    with_engine(scenario, 1000, manual=True, watch_s=60)
