from __future__ import annotations

import asyncio

import pytest
from drivers.virtual_time import DeadlockError, LivelockError, run_virtual


def test_the_clock_jumps_to_the_next_timer() -> None:
    async def body() -> list[float]:
        loop = asyncio.get_running_loop()
        times: list[float] = []

        async def note(seconds: float) -> None:
            await asyncio.sleep(seconds)
            times.append(loop.time())

        cut = asyncio.create_task(note(5000))
        await asyncio.gather(note(3600), note(0.25), note(86400))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 7)
        assert cut.done()
        return [*times, loop.time()]

    assert run_virtual(body) == [0.25, 3600, 5000, 86400, 86407]


def test_a_deadlock_is_an_error_that_says_who_waits() -> None:
    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    async def body() -> None:
        await asyncio.wait({asyncio.create_task(wait(), name="the one"), asyncio.Future()})

    ends: list[str] = []
    with pytest.raises(
        DeadlockError, match=r"these tasks wait:\n(.*\n)?  the one at .*_time.py:\d+"
    ):
        run_virtual(body)
    assert ends == ["cancelled"]


def test_work_that_never_ends_is_an_error() -> None:
    async def body() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(LivelockError, match="more than 500 callbacks"):
        run_virtual(body, max_callbacks=500)


def test_an_invariant_is_checked_after_every_callback() -> None:
    values: list[int] = []

    def check() -> None:
        assert values[-1:] != [1], "one is seen, though it is there for a moment only"

    async def body() -> None:
        for value in range(3):
            values.append(value)
            await asyncio.sleep(0)

    with pytest.raises(AssertionError, match="one is seen"):
        run_virtual(body, check=check)


def test_a_failing_seed_is_printed_with_its_schedule() -> None:
    async def body() -> None:
        await asyncio.sleep(1.5)
        raise ValueError

    with pytest.raises(ValueError) as caught:  # noqa: PT011
        run_virtual(body, seed=17)
    (note,) = caught.value.__notes__
    assert note.startswith("virtual time: seed 17, at 1.5000 s, after 4 callbacks; the last ones:")
    assert "1.5000 Task-" in note


def test_seeds_differ_in_the_order_of_what_is_ready() -> None:
    def order(seed: int, shuffle: bool) -> str:
        letters: list[str] = []

        async def body() -> None:
            async def say(letter: str) -> None:
                letters.append(letter)

            await asyncio.gather(*(say(letter) for letter in "abcd"))

        run_virtual(body, seed=seed, shuffle=shuffle)
        return "".join(letters)

    assert {order(seed, False) for seed in range(20)} == {"abcd"}
    assert len({order(seed, True) for seed in range(200)}) == 24
