"""Requests on an engine of several replicas, all of them fakes."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from engines.replicas import FakeSupplier, plan
from engines.routed import ask, loads, release, request, settle, short_pauses, until, with_engine

from paceline.engines.http import LostServerError
from paceline.engines.router import RoutedEngine
from paceline.errors import EngineError

__all__ = ["short_pauses"]


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
