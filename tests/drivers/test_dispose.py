from __future__ import annotations

import asyncio

import pytest

from paceline.drivers.dispose import Disposer


def closer(log: list[str], name: str, error: Exception | None = None):
    async def close() -> None:
        log.append(name)
        if error is not None:
            raise error

    return close


def test_closes_in_reverse_order_after_success() -> None:
    log: list[str] = []

    async def body() -> None:
        async with Disposer() as disposer:
            disposer.add("a", closer(log, "a"))
            disposer.add("b", lambda: log.append("b"))

    asyncio.run(body())
    assert log == ["b", "a"]


def test_body_error_is_kept_and_failures_become_notes() -> None:
    log: list[str] = []

    async def body() -> None:
        async with Disposer() as disposer:
            disposer.add("a", closer(log, "a"))
            disposer.add("b", closer(log, "b", OSError("disk")))
            raise ValueError("original")

    with pytest.raises(ValueError, match="original") as caught:
        asyncio.run(body())
    assert log == ["b", "a"]
    assert any("disk" in note for note in caught.value.__notes__)


def test_failure_of_closing_is_raised_after_a_clean_body() -> None:
    log: list[str] = []

    async def body() -> None:
        async with Disposer() as disposer:
            disposer.add("a", closer(log, "a"))
            disposer.add("b", closer(log, "b", OSError("disk")))

    with pytest.raises(OSError, match="disk"):
        asyncio.run(body())
    assert log == ["b", "a"]


def test_cancellation_closes_everything() -> None:
    log: list[str] = []

    async def body() -> None:
        async with Disposer() as disposer:
            disposer.add("a", closer(log, "a"))
            await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(body())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert log == ["a"]


def test_a_hanging_close_is_bounded_and_the_rest_still_runs() -> None:
    log: list[str] = []

    async def hang() -> None:
        await asyncio.Event().wait()

    async def body() -> None:
        async with Disposer() as disposer:
            disposer.add("a", closer(log, "a"))
            disposer.add("stuck", hang, timeout_s=0.01)

    with pytest.raises(TimeoutError, match="closing stuck"):
        asyncio.run(body())
    assert log == ["a"]


def test_dispose_is_idempotent() -> None:
    log: list[str] = []

    async def body() -> None:
        disposer = Disposer()
        disposer.add("a", closer(log, "a"))
        assert await disposer.dispose() == []
        assert await disposer.dispose() == []

    asyncio.run(body())
    assert log == ["a"]
