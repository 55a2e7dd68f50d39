"""What is left behind when a run ends: nothing, or something that is named and does not hold it."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from paceline.build.loop import leave_behind

STUBBORN = """
import asyncio
from paceline.build import loop

async def stubborn():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

async def main():
    asyncio.create_task(stubborn(), name="the user's")
    await asyncio.sleep(0)
    return 7

loop.LEAVE_GRACE_S = 0.1
loop.leave_behind.__defaults__ = (0.1,)
print(loop.run_to_end(main))
"""


def test_a_task_that_swallows_cancellation_does_not_keep_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUBBORN], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "7"
    assert "the user's" in done.stderr
    assert done.returncode == 0


def test_what_ends_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []

    async def tidy() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            ended.append("tidy")

    async def body() -> list[str]:
        asyncio.create_task(tidy())  # noqa: RUF006
        await asyncio.sleep(0)
        return await leave_behind()

    assert asyncio.run(body()) == []
    assert ended == ["tidy"]
    assert not caplog.records
