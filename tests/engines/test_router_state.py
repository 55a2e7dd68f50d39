"""Pauses, publishes, sleep and end of an engine of several replicas, all of them fakes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engines.replicas import FakeReplica, FakeSource, FakeSupplier, plan, refused
from engines.routed import ask, loads, release, request, settle, short_pauses, until, with_engine

from paceline.engines.base import Completion, CutSignal
from paceline.engines.http import LostServerError
from paceline.engines.router import RoutedEngine
from paceline.errors import EngineError, WeightError
from paceline.weights.base import WeightPlan

__all__ = ["short_pauses"]


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
