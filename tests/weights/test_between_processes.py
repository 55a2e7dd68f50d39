"""A publish to processes of other programs: handles of shared memory, and a gloo broadcast."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from weight_receiver import ReceiverProcess, receiver_processes

from paceline.errors import WeightError
from paceline.weights.base import Meeting, Parcel, WeightPlan
from paceline.weights.collective import Listener, broadcast, join
from paceline.weights.shared_memory import PREFIX, ROOT
from paceline.weights.source import LocalSource, Outbox
from paceline.weights.tensors import checksums

pytestmark = pytest.mark.slow
SIZE = 1 << 16


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(100, 64, generator=drawn).bfloat16(),
        "norm": torch.randn(64, generator=drawn),
        "steps": torch.arange(5),
        "scale": torch.tensor(float(seed)),
        "large": torch.randn(200, 128, generator=drawn),
    }


def outbox(tensors: dict[str, torch.Tensor], **settings: Any) -> Outbox:
    return Outbox(lambda: tensors.items(), **settings)


def segments() -> set[Path]:
    found = ROOT.glob(f"{PREFIX}*")
    # That of another process which runs belongs to a test beside this one.
    return {path for path in found if not is_another(int(path.name.split("-")[1]))}


def is_another(pid: int) -> bool:
    return pid != os.getpid() and Path(f"/proc/{pid}").exists()


@pytest.fixture(scope="module")
def receivers() -> Iterator[list[ReceiverProcess]]:
    with receiver_processes(2) as started:
        for receiver in started:
            assert receiver.ask("ready")
        yield started


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = segments()
    yield
    until(lambda: segments() <= before)


def until(is_true: Callable[[], bool], limit_s: float = 20) -> None:
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def metadata(parcel: Parcel) -> dict[str, Any]:
    return {
        "names": [t.name for t in parcel.tensors],
        "dtypes": [t.dtype for t in parcel.tensors],
        "shapes": [list(t.shape) for t in parcel.tensors],
    }


def send_handles(box: Outbox, receivers: list[ReceiverProcess], version: int = 1) -> int:
    box.open(version, "handles", SIZE)
    parcels = 0
    while (parcel := box.next_parcel()) is not None:
        parcels += 1
        for receiver in receivers:
            assert receiver.ask("handles", text=parcel.handles[0]) == len(parcel.tensors)
    box.close()
    return parcels


def test_each_receiver_of_handles_gets_every_bit(receivers: list[ReceiverProcess]) -> None:
    for version in range(3):
        tensors = tensors_of(version)
        assert send_handles(outbox(tensors), receivers, version) > 1
        for receiver in receivers:
            assert receiver.ask("checksums") == checksums(tensors)


def test_receivers_that_hold_on_to_a_parcel_do_no_harm(receivers: list[ReceiverProcess]) -> None:
    """A server may free what it was sent after the sender has gone on, or has ended."""
    box = outbox(tensors_of(1))
    box.open(1, "handles", SIZE)
    parcel = box.next_parcel()
    assert parcel is not None
    for receiver in receivers:
        receiver.ask("handles", text=parcel.handles[0], copy=False)
    box.dispose()
    for receiver in receivers:
        receiver.ask("let_go")
    assert send_handles(outbox(tensors_of(2)), receivers)
    assert receivers[1].ask("checksums") == checksums(tensors_of(2))


def test_a_receiver_that_is_killed_costs_only_itself(receivers: list[ReceiverProcess]) -> None:
    box = outbox(tensors_of(1))
    box.open(1, "handles", SIZE)
    parcel = box.next_parcel()
    assert parcel is not None
    with receiver_processes(1) as (victim,):
        victim.ask("handles", text=parcel.handles[0], copy=False)
        victim.kill()
    assert receivers[0].ask("handles", text=parcel.handles[0])
    assert box.next_parcel() is not None
    box.close()


SENDER = """
import sys, torch
from paceline.weights.source import Outbox
box = Outbox(lambda: [("w", torch.arange(8.0))])
box.open(1, "handles", 1 << 16)
print(box.next_parcel().handles[0], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("group", [True, False], ids=["with its group", "alone"])
def test_a_sender_that_is_killed_leaves_nothing(
    receivers: list[ReceiverProcess], group: bool
) -> None:
    before = segments()
    sender = subprocess.Popen(
        [sys.executable, "-c", SENDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert sender.stdout is not None
    assert sender.stdin is not None
    text = sender.stdout.readline()
    receivers[0].ask("handles", text=text.strip(), copy=False)
    assert list(ROOT.glob(f"{PREFIX}{sender.pid}-*"))
    subprocess.run(["kill", "-9", "--", f"{'-' if group else ''}{sender.pid}"], check=True)
    sender.wait(timeout=30)
    # Who reads its output to the end is not held up by a helper of it.
    assert sender.stdout.read() == ""
    sender.stdout.close()
    sender.stdin.close()
    until(lambda: not list(ROOT.glob(f"{PREFIX}{sender.pid}-*")))
    assert segments() <= before
    receivers[0].ask("let_go")
    assert receivers[0].ask("ready")


def test_an_error_while_tensors_are_made_leaves_nothing() -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(SIZE)
        yield "v", torch.ones(3)
        raise ArithmeticError("no more")

    before = segments()
    box = Outbox(broken)
    box.open(1, "handles", SIZE)
    assert box.next_parcel() is not None
    with pytest.raises(ArithmeticError):
        box.next_parcel()
    box.close()
    assert segments() == before


def meet(box: Outbox, receivers: list[ReceiverProcess], name: str) -> Meeting:
    address, port = box.meeting_point()
    meeting = Meeting(name, address, port, 1 + len(receivers), "gloo")
    for rank, receiver in enumerate(receivers, 1):
        receiver.tell(
            "join", address=address, port=port, rank=rank, size=meeting.size, name=name, limit=30
        )
    box.meet(meeting)
    for receiver in receivers:
        receiver.answer()
    return meeting


def send_broadcast(box: Outbox, receivers: list[ReceiverProcess]) -> None:
    box.open(1, "collective", SIZE)
    while (parcel := box.next_parcel()) is not None:
        for receiver in receivers:
            receiver.tell("receive", **metadata(parcel))
        box.broadcast()
        for receiver in receivers:
            receiver.answer()
    box.close()


@pytest.mark.parametrize("number", [1, 2])
def test_each_member_of_a_group_gets_every_bit(
    receivers: list[ReceiverProcess], number: int
) -> None:
    some = receivers[:number]
    tensors = tensors_of(1)
    box = outbox(tensors, timeout_s=30)
    meeting = meet(box, some, f"weights-{number}")
    for seed in (1, 2):
        tensors |= tensors_of(seed)
        box.meet(meeting)  # again: nothing happens
        send_broadcast(box, some)
        for receiver in some:
            assert receiver.ask("checksums") == checksums(tensors)
    box.dispose()


def test_a_group_of_another_name_takes_the_place_of_the_first(
    receivers: list[ReceiverProcess],
) -> None:
    tensors = tensors_of(4)
    box = outbox(tensors, timeout_s=30)
    meet(box, receivers, "before")
    meet(box, receivers[:1], "after")
    send_broadcast(box, receivers[:1])
    assert receivers[0].ask("checksums") == checksums(tensors)
    box.dispose()


def test_members_that_never_come_end_the_meeting_in_time() -> None:
    box = outbox(tensors_of(1), timeout_s=1.0)
    address, port = box.meeting_point()
    began = time.monotonic()
    with pytest.raises(WeightError, match="did not meet the others"):
        box.meet(Meeting("nobody", address, port, 3, "gloo"))
    assert time.monotonic() - began < 20
    box.dispose()


def test_a_meeting_can_be_given_up() -> None:
    box = outbox(tensors_of(1), timeout_s=60)
    address, port = box.meeting_point()
    threading.Timer(0.3, box.abort).start()
    began = time.monotonic()
    with pytest.raises(WeightError, match="it was stopped"):
        box.meet(Meeting("nobody", address, port, 2, "gloo"))
    assert time.monotonic() - began < 20


def test_a_member_that_does_not_receive_ends_the_broadcast_in_time(
    receivers: list[ReceiverProcess],
) -> None:
    tensors = {"large": torch.zeros(1 << 24)}  # more than sockets hold
    box = outbox(tensors, timeout_s=3)
    meet(box, receivers, "silent")
    box.open(1, "collective", 1 << 30)
    assert box.next_parcel() is not None
    began = time.monotonic()
    with pytest.raises(WeightError, match=r"broadcast of 64\.0 MiB in group 'silent' of 3 failed"):
        box.broadcast()
    assert time.monotonic() - began < 20
    with pytest.raises(WeightError, match="has met nobody"):
        box.broadcast()
    box.dispose()


def test_a_member_that_is_killed_ends_the_broadcast() -> None:
    tensors = {"large": torch.zeros(1 << 24)}
    box = outbox(tensors, timeout_s=60)
    with receiver_processes(1) as (victim,):
        meet(box, [victim], "killed")
        victim.kill()
        box.open(1, "collective", 1 << 30)
        assert box.next_parcel() is not None
        began = time.monotonic()
        with pytest.raises(WeightError, match="failed"):
            box.broadcast()
        assert time.monotonic() - began < 20
    box.dispose()


def test_a_cancelled_broadcast_ends_at_once(receivers: list[ReceiverProcess]) -> None:
    box = outbox({"large": torch.zeros(1 << 24)}, timeout_s=60)
    meet(box, receivers, "cancelled")
    plan = WeightPlan("p", 1, "collective", bucket_bytes=1 << 30)
    source = LocalSource(box, plan, asyncio.to_thread)

    async def send() -> None:
        async for parcel in source.parcels():
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await source.broadcast(parcel)
            return

    began = time.monotonic()
    asyncio.run(send())
    assert time.monotonic() - began < 20
    box.dispose()


def test_both_ends_of_a_group_may_be_of_this_package() -> None:
    listener = Listener("127.0.0.1")
    meeting = Meeting("own", "127.0.0.1", listener.port, 2, "gloo")
    got = torch.zeros(100, dtype=torch.uint8)

    def receive() -> None:
        group = join(meeting, 1, 30)
        broadcast(group, got, 30)

    other = threading.Thread(target=receive)
    other.start()
    broadcast(join(meeting, 0, 30, listener=listener), torch.arange(100, dtype=torch.uint8), 30)
    other.join(30)
    assert torch.equal(got, torch.arange(100, dtype=torch.uint8))
