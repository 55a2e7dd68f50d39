"""Weights on their way to several replicas: fakes, and one pass over the parcels."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engines.replicas import FakeReplica, FakeSource, FakeWeights, plan, refused

from paceline.engines.delivery import Delivery
from paceline.engines.http import LostServerError
from paceline.engines.replica import WeightIntake
from paceline.errors import WeightError


def intakes(count: int) -> list[FakeWeights]:
    return [FakeReplica(f"replica {i}").weights for i in range(count)]


def names(weights: FakeWeights) -> list[str]:
    return [call[0] for call in weights.calls]


def bring(
    delivery: Delivery,
    replicas: list[FakeWeights],
    source: FakeSource,
    transport: Any = "handles",
    *,
    version: int = 1,
    holds_former: bool = True,
) -> tuple[list[WeightIntake], list[WeightIntake]]:
    """Those that have the weights, and those that were lost."""
    lost: list[WeightIntake] = []

    async def main() -> list[WeightIntake]:
        async with asyncio.timeout(10):
            return await delivery.bring(
                plan(version, transport, source),
                replicas,
                lambda weights, error: lost.append(weights),
                holds_former=holds_former,
            )

    return asyncio.run(main()), lost


def delivery(timeout_s: float = 5.0) -> Delivery:
    return Delivery(backend="gloo", timeout_s=timeout_s)


def test_each_parcel_goes_to_all_before_the_next_is_made() -> None:
    replicas, source = intakes(3), FakeSource()
    there, _ = bring(delivery(), replicas, source)
    assert there == replicas
    for weights in replicas:
        assert names(weights) == ["begin", "take", "take", "take", "end"]
        assert [c[1].handles[0] for c in weights.calls if c[0] == "take"] == ["0", "1", "2"]
    assert source.log == ["parcel 0", "parcel 1", "parcel 2", "closed"]


@pytest.mark.parametrize("step", ["begin", "take", "end"])
def test_one_that_is_lost_does_not_stop_the_others(step: str) -> None:
    replicas, source = intakes(3), FakeSource()
    replicas[1].fail[step] = LostServerError("gone")
    there, lost = bring(delivery(), replicas, source)
    assert there == [replicas[0], replicas[2]]
    assert lost == [replicas[1]]
    assert names(replicas[1])[-1] == step


def test_none_is_left() -> None:
    replicas, source = intakes(2), FakeSource()
    for weights in replicas:
        weights.fail["take"] = LostServerError("gone")
    with pytest.raises(WeightError, match="no replica is left"):
        bring(delivery(), replicas, source)
    assert source.log == ["parcel 0", "closed"]


def test_a_refusal_ends_the_publish_and_the_parcels() -> None:
    replicas, source = intakes(3), FakeSource()
    replicas[1].fail["take"] = refused()
    with pytest.raises(WeightError, match="the server refused"):
        bring(delivery(), replicas, source)
    assert source.log == ["parcel 0", "closed"]
    assert "end" not in names(replicas[0])


@pytest.mark.parametrize(("holds_former", "changed"), [(True, "/changed"), (False, None)])
def test_changes_alone_go_to_those_that_hold_the_rest(
    holds_former: bool, changed: str | None
) -> None:
    replicas, source = intakes(2), FakeSource(changed="/changed")
    bring(delivery(), replicas, source, "disk", holds_former=holds_former)
    assert {c[1].changed for w in replicas for c in w.calls if c[0] == "take"} == {changed}


def test_a_meeting_lasts_as_long_as_its_members() -> None:
    replicas, source, same = intakes(3), FakeSource(), delivery()
    replicas[1].num_devices = 2
    bring(same, replicas, source, "collective")
    joins = [weights.calls[0] for weights in replicas]
    assert [(name, rank, size) for name, _, rank, size in joins] == [
        ("join", 1, 5), ("join", 2, 5), ("join", 4, 5)
    ]  # fmt: skip
    assert len({name for _, name, _, _ in joins}) == 1
    bring(same, replicas, source, "collective", version=2)
    assert [names(weights).count("join") for weights in replicas] == [1, 1, 1]
    bring(same, replicas[:2], source, "collective", version=3)
    assert [names(weights).count("join") for weights in replicas] == [2, 2, 1]
    assert [entry for entry in source.log if "meet" in entry] == [
        "meet at 1 of 5",
        "meet at 2 of 4",
    ]
    assert source.log.count("broadcast") == 9


def test_a_rejected_broadcast_does_not_leave_the_sender_waiting() -> None:
    replicas, source, same = intakes(2), FakeSource(), delivery()
    source.broadcasts_hang = True
    replicas[0].fail["take"] = refused()
    replicas[1].hang.add("take")
    with pytest.raises(WeightError, match="the server refused"):
        bring(same, replicas, source, "collective")
    assert source.log[-2:] == ["broadcast ended", "closed"]
    source.broadcasts_hang = False
    replicas[0].fail.clear()
    replicas[1].hang.clear()
    bring(same, replicas, source, "collective", version=2)
    assert [names(weights).count("join") for weights in replicas] == [2, 2]


def test_a_lost_member_ends_a_broadcast() -> None:
    replicas, source = intakes(2), FakeSource()
    source.broadcasts_hang = True
    replicas[1].fail["take"] = LostServerError("gone")
    with pytest.raises(WeightError, match="a broadcast failed: gone"):
        bring(delivery(), replicas, source, "collective")


def test_a_sender_that_fails_ends_the_wait_of_the_servers() -> None:
    replicas, source = intakes(2), FakeSource()
    source.fail_broadcast = RuntimeError("NCCL")
    replicas[0].hang.add("take")
    with pytest.raises(WeightError, match="a broadcast failed: NCCL"):
        bring(delivery(), replicas, source, "collective")


def test_a_meeting_that_does_not_come_together() -> None:
    replicas, source = intakes(2), FakeSource()
    replicas[1].hang.add("join")
    with pytest.raises(WeightError, match=r"the meeting did not come to an end within 0\.1 s"):
        bring(delivery(0.1), replicas, source, "collective")
    assert "parcel 0" not in source.log
