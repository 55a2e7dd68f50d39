from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from drivers.virtual_time import DeadlockError, run_virtual
from feeds import make_group, varied

from paceline.data.buffer import Buffer
from paceline.data.tickets import Event, Taken
from paceline.errors import CheckpointError, ResumeMismatchError
from paceline.types import Draw, Group, Prompt


def draw(ordinal: int) -> Draw:
    return Draw(ordinal, ordinal // 10, Prompt(id=f"p{ordinal}", text=str(ordinal)))


def group(ordinal: int) -> Group:
    return make_group(draw(ordinal), ["policy"], varied)


def make(batch: int = 2, max_staleness: int = 0, **options: Any) -> Buffer:
    return Buffer("policy", batch=batch, max_staleness=max_staleness, **options)


def fill(buffer: Buffer, *ordinals: int) -> None:
    for ordinal in ordinals:
        buffer.admit(draw(ordinal))
        buffer.deliver(ordinal, group(ordinal))


def take(buffer: Buffer, n: int | None = None) -> Taken:
    """What there is to take now; a wait would be a deadlock."""
    return run_virtual(lambda: buffer.take(n))


def ordinals(taken: Taken) -> list[int]:
    return [group.draw for group in taken.groups]


def step(buffer: Buffer) -> list[int]:
    taken = ordinals(take(buffer))
    buffer.learned()
    buffer.published(buffer.trained_step)
    return taken


# Slots


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_slots_are_taken_at_admission_and_come_back_with_a_publish(max_staleness: int) -> None:
    buffer = make(2, max_staleness)
    size = 2 * (max_staleness + 1)
    fill(buffer, *range(size))
    assert buffer.num_free == 0
    with pytest.raises(ValueError, match=f"no free slot for draw {size}"):
        buffer.admit(draw(size))
    assert ordinals(take(buffer)) == [0, 1]
    assert buffer.num_free == 0
    buffer.learned()
    assert buffer.num_free == 0
    buffer.published(1)
    assert buffer.num_free == 2


def test_a_dropped_or_withdrawn_group_frees_its_slot_at_once() -> None:
    buffer = make()
    buffer.admit(draw(0))
    buffer.admit(draw(1))
    assert buffer.num_free == 0
    buffer.drop(0, "failed", group(0))
    assert buffer.num_free == 1
    buffer.withdraw(1)
    buffer.withdraw(1)
    assert buffer.num_free == 2


def test_after_a_restore_at_step_100_there_are_96_slots() -> None:
    buffer = make(32, 2, step=100)
    assert buffer.num_free == 96
    fresh = make(32, 2)
    fresh.restore(through_a_file(buffer)[0], {}, {}, step=100)
    assert fresh.num_free == 96
    fill(fresh, *range(40))
    assert fresh.num_free == 56


def test_publishing_what_is_not_trained_is_refused() -> None:
    buffer = make()
    with pytest.raises(ValueError, match="can not publish step 1"):
        buffer.published(1)
    fill(buffer, 0, 1)
    step(buffer)
    with pytest.raises(ValueError, match="can not publish step 0"):
        buffer.published(0)


# Order


def test_groups_are_taken_in_the_order_of_draws_however_they_come() -> None:
    buffer = make(2, 1)
    for ordinal in range(4):
        buffer.admit(draw(ordinal))
    arrivals = [3, 1, 2, 0]

    async def run() -> list[int]:
        taker = asyncio.create_task(buffer.take())
        for ordinal in arrivals:
            await asyncio.sleep(1)
            assert not taker.done()
            buffer.deliver(ordinal, group(ordinal))
        return ordinals(await taker)

    assert run_virtual(run) == [0, 1]
    buffer.learned()
    assert step(buffer) == [2, 3]


@pytest.mark.parametrize("how", ["withdrawn", "restored"])
def test_a_cancelled_draw_keeps_its_place(how: str) -> None:
    buffer = make(1, 2)
    for ordinal in range(3):
        buffer.admit(draw(ordinal))
    buffer.deliver(1, group(1))
    if how == "restored":
        buffer = restored(buffer)
    else:
        buffer.withdraw(0)
        buffer.withdraw(2)
    with pytest.raises(DeadlockError):
        take(buffer)
    fill(buffer, 0)
    assert [step(buffer), step(buffer)] == [[0], [1]]


def test_a_step_tells_of_what_was_dropped_before_its_last_group() -> None:
    buffer = make(2, 2)
    for ordinal in range(6):
        buffer.admit(draw(ordinal))
    for ordinal in (1, 4):
        buffer.drop(ordinal, "zero_variance", group(ordinal))
    for ordinal in (0, 2, 3, 5):
        buffer.deliver(ordinal, group(ordinal))
    assert [lost.ordinal for lost in take(buffer).dropped] == [1]
    buffer.learned()
    assert [lost.ordinal for lost in take(buffer).dropped] == [4]


def test_only_running_draws_are_delivered_or_dropped() -> None:
    buffer = make()
    with pytest.raises(ValueError, match="draw 0 does not run for policy 'policy'"):
        buffer.deliver(0, group(0))
    fill(buffer, 0)
    with pytest.raises(ValueError, match="does not run"):
        buffer.drop(0, "failed")
    with pytest.raises(ValueError, match="has draw 0 already"):
        buffer.admit(draw(0))


def test_it_knows_what_a_take_waits_for() -> None:
    buffer = make(2, 1)
    for ordinal in range(4):
        buffer.admit(draw(ordinal))
    buffer.deliver(0, group(0))

    async def run() -> tuple[list[int], list[int]]:
        before = buffer.blocking()
        taker = asyncio.create_task(buffer.take())
        await asyncio.sleep(1)
        found = buffer.blocking()
        taker.cancel()
        return before, found

    assert run_virtual(run) == ([], [1])


def test_the_epoch_is_that_of_the_first_draw_not_taken() -> None:
    buffer = make(2, 5)
    assert buffer.first_epoch is None
    fill(buffer, 8, 9, 10)
    assert buffer.first_epoch == 0
    take(buffer)
    assert buffer.first_epoch == 1


# The end


def test_a_closed_buffer_gives_what_is_left_then_nothing() -> None:
    buffer = make(2, 1)
    fill(buffer, 0, 1, 2)
    buffer.close()
    assert not take(buffer).is_exhausted
    buffer.learned()
    last = take(buffer)
    assert (ordinals(last), last.is_exhausted) == ([2], True)
    buffer.learned()
    for _ in range(2):
        nothing = take(buffer)
        assert (nothing.groups, nothing.is_exhausted) == ([], True)


def test_every_waiter_gets_the_original_exception_at_once() -> None:
    buffer = make()
    failure = RuntimeError("engine")

    async def run() -> list[BaseException]:
        takers = [asyncio.create_task(buffer.take()) for _ in range(3)]
        await asyncio.sleep(1)
        buffer.fail(failure)
        buffer.fail(RuntimeError("later"))
        return await asyncio.gather(*takers, return_exceptions=True)

    assert all(found is failure for found in run_virtual(run))
    with pytest.raises(RuntimeError, match="engine"):
        take(buffer)


@pytest.mark.parametrize("seed", range(20))
def test_a_cancelled_take_loses_nothing(seed: int) -> None:
    buffer = make()
    buffer.admit(draw(0))
    buffer.admit(draw(1))

    async def run() -> list[int]:
        taker = asyncio.create_task(buffer.take())
        await asyncio.sleep(1)
        buffer.deliver(0, group(0))
        buffer.deliver(1, group(1))
        if seed % 2:
            await asyncio.sleep(0)
        taker.cancel()
        await asyncio.wait({taker})
        return ordinals(await buffer.take())

    assert run_virtual(run, seed=seed) == [0, 1]


def test_learning_from_nothing_is_refused() -> None:
    with pytest.raises(RuntimeError, match="did not take"):
        make().learned()


# Buffers that drop the oldest


def test_drop_oldest_bounds_what_is_ready_and_takes_no_slots() -> None:
    buffer = make(2, 1, on_full="drop_oldest")
    fill(buffer, *range(10))
    assert (buffer.num_free, buffer.num_ready) == (None, 4)
    taken = take(buffer)
    assert ordinals(taken) == [6, 7]
    assert [(lost.ordinal, lost.reason) for lost in taken.dropped] == [
        (i, "oldest") for i in range(6)
    ]
    assert all(lost.group is None for lost in taken.dropped)


def test_drop_oldest_skips_what_is_still_running() -> None:
    buffer = make(2, 1, on_full="drop_oldest")
    buffer.admit(draw(0))
    fill(buffer, 1, 2)
    assert step(buffer) == [1, 2]
    buffer.deliver(0, group(0))
    fill(buffer, 3)
    assert step(buffer) == [0, 3]


def test_drop_oldest_drops_what_would_be_too_stale() -> None:
    buffer = make(1, 1, on_full="drop_oldest")
    buffer.admit(draw(0))
    for ordinal in (1, 2):
        fill(buffer, ordinal)
        step(buffer)
    buffer.deliver(0, group(0))
    assert buffer.num_ready == 0
    fill(buffer, 3)
    taken = take(buffer)
    assert (ordinals(taken), taken.staleness) == ([3], [0])
    assert [(lost.ordinal, lost.reason) for lost in taken.dropped] == [(0, "oldest")]


def test_drop_oldest_keeps_few_dropped_groups_in_memory() -> None:
    buffer = make(1, 1, on_full="drop_oldest")
    for ordinal in range(9):
        buffer.admit(draw(ordinal))
        buffer.drop(ordinal, "zero_variance", group(ordinal))
    fill(buffer, 9)
    dropped = take(buffer).dropped
    assert len(dropped) == 9
    assert [lost.ordinal for lost in dropped if lost.group is not None] == [7, 8]


# Checkpoints


def through_a_file(buffer: Buffer) -> tuple[dict[str, Any], dict[str, Any]]:
    groups: dict[str, Any] = {}
    state = buffer.state(groups)
    return json.loads(json.dumps(state)), json.loads(json.dumps(groups, allow_nan=False))


def restored(buffer: Buffer, **options: Any) -> Buffer:
    state, groups = through_a_file(buffer)
    options = {"batch": buffer.batch, "max_staleness": buffer.max_staleness, **options}
    fresh = make(on_full=buffer.on_full, **options)
    fresh.restore(state, groups, {}, step=buffer.trained_step)
    return fresh


def test_taken_groups_are_ready_again_and_running_ones_are_not_there() -> None:
    buffer = make(2, 2)
    fill(buffer, 0, 1)
    step(buffer)
    for ordinal in range(2, 7):
        buffer.admit(draw(ordinal))
    for ordinal in (2, 4, 5):
        buffer.deliver(ordinal, group(ordinal))
    buffer.drop(3, "failed", group(3))
    buffer.note_straggler()
    before = take(buffer)
    for fresh in (restored(buffer), restored(restored(buffer))):
        assert (fresh.trained_step, fresh.published_step) == (1, 1)
        assert (fresh.num_ready, fresh.num_running, fresh.num_taken) == (3, 0, 0)
        after = take(fresh)
        assert repr(after.groups) == repr(before.groups)
        assert (after.staleness, after.num_stragglers) == (before.staleness, 1)
        assert [(lost.ordinal, lost.reason) for lost in after.dropped] == [(3, "failed")]
        assert repr(after.dropped[0].group) == repr(group(3))


def test_buffers_of_one_feed_share_their_groups() -> None:
    one, two = make(), make()
    shared = group(0)
    for buffer in (one, two):
        buffer.admit(draw(0))
        buffer.deliver(0, shared)
    groups: dict[str, Any] = {}
    states = [buffer.state(groups) for buffer in (one, two)]
    assert list(groups) == ["0"]
    known: dict[str, Group] = {}
    for state, buffer in zip(states, (one, two), strict=True):
        buffer.restore(state, groups, known, step=0)
    taken = [take(buffer, 1) for buffer in (one, two)]
    assert taken[0].groups[0] is taken[1].groups[0]


def test_a_state_of_another_step_is_refused() -> None:
    state, groups = through_a_file(make(step=7))
    with pytest.raises(ResumeMismatchError, match="is of step 7, its weights are of step 8"):
        make().restore(state, groups, {}, step=8)


def test_more_than_fits_is_refused() -> None:
    buffer = make(2, 2)
    fill(buffer, *range(5))
    assert restored(buffer, max_staleness=3).num_free == 3
    with pytest.raises(ResumeMismatchError, match=r"holds 5 finished groups.* = 4 fit"):
        restored(buffer, max_staleness=1)


@pytest.mark.parametrize(
    "damage",
    [
        {"step": None},
        {"ready": [[0, 0]]},
        {"ready": [[9, 0, 0]]},
        {"ready": 5},
        {"dropped": [["x", "failed", False]]},
        {"stragglers": None},
        {"awaited": ["x"]},
    ],
    ids=str,
)
def test_a_damaged_state_is_an_error_that_says_whose(damage: dict[str, Any]) -> None:
    buffer = make()
    fill(buffer, 0)
    state, groups = through_a_file(buffer)
    with pytest.raises(CheckpointError, match="buffer of policy 'policy' is damaged"):
        make().restore({**state, **damage}, groups, {}, step=0)
    with pytest.raises(CheckpointError, match="buffer of policy 'policy' is damaged"):
        make().restore({}, groups, {}, step=0)


def test_events_tell_the_life_of_every_draw() -> None:
    events: list[Event] = []
    buffer = make(1, 2, record=events.append)
    for ordinal in range(3):
        buffer.admit(draw(ordinal))
    buffer.withdraw(2)
    buffer.drop(1, "failed")
    buffer.deliver(0, group(0))
    step(buffer)
    assert [(e.kind, e.ordinal, e.step, e.reason) for e in events] == [
        ("running", 0, 0, ""),
        ("running", 1, 0, ""),
        ("running", 2, 0, ""),
        ("withdrawn", 2, 0, ""),
        ("dropped", 1, 0, "failed"),
        ("sampled", 0, 0, ""),
        ("taken", 0, 1, ""),
        ("trained", 0, 1, ""),
    ]
