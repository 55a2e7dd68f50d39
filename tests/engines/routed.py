"""An engine of fake replicas, for the time of a scenario."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from engines.replicas import FakeSupplier

from paceline.engines.base import Completion, Request, Sampling
from paceline.engines.router import RoutedEngine

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
