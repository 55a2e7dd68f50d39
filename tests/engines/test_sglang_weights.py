"""New weights for one server, against a stand-in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from engines.sglang_server import StandIn, stand_in

from paceline.engines.http import JsonClient, LostServerError
from paceline.engines.sglang_weights import FLUSHES, SGLangWeights
from paceline.errors import WeightError
from paceline.weights.base import Meeting, Parcel, TensorInfo

TENSORS = (TensorInfo("a.weight", "float32", (2, 3)), TensorInfo("b.weight", "bfloat16", (4,)))
MEETING = Meeting("meeting-1", "10.0.0.1", 4567, 3, "gloo")


def with_weights(
    scenario: Callable[[SGLangWeights, StandIn], Awaitable[None]], **changes: Any
) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), stand_in() as server:
            client = JsonClient()
            options: dict[str, Any] = {
                "policy": "policy", "first_device": 0, "num_devices": 1, "timeout_s": 5.0,
                "takes_pickles": True,
            }  # fmt: skip
            try:
                await scenario(SGLangWeights(server.url, client, **(options | changes)), server)
            finally:
                await client.aclose()

    asyncio.run(main())


def test_the_order_of_a_publish_by_handles() -> None:
    async def scenario(weights: SGLangWeights, server: StandIn) -> None:
        await weights.begin("handles")
        await weights.take(Parcel(TENSORS, handles=("first",)), "handles")
        await weights.take(Parcel(TENSORS, handles=("second",)), "handles")
        assert weights.held == 0
        await weights.end(5)
        assert server.paths == [
            "/begin_weight_update", "/update_weights_from_tensor", "/update_weights_from_tensor",
            "/end_weight_update", "/flush_cache", "/update_weight_version",
        ]  # fmt: skip
        assert [b["serialized_named_tensors"] for b in server.bodies(server.paths[1])] == [
            ["first"], ["second"]
        ]  # fmt: skip
        assert all(b["flush_cache"] is False for b in server.bodies("/update_weights_from_tensor"))
        assert (server.version, weights.held, await weights.version()) == ("5", 5, 5)
        assert weights.salt is None

    with_weights(scenario)


def test_a_broadcast_is_announced() -> None:
    async def scenario(weights: SGLangWeights, server: StandIn) -> None:
        with pytest.raises(WeightError, match="has not met with the trainer"):
            await weights.take(Parcel(TENSORS), "collective")
        await weights.join(MEETING, 2)
        (joined,) = server.bodies("/init_weights_update_group")
        assert joined == {
            "master_address": "10.0.0.1", "master_port": 4567, "rank_offset": 2, "world_size": 3,
            "group_name": "meeting-1", "backend": "gloo",
        }  # fmt: skip
        await weights.begin("collective")
        await weights.take(Parcel(TENSORS), "collective")
        (announced,) = server.bodies("/update_weights_from_distributed")
        assert announced["names"] == ["a.weight", "b.weight"]
        assert announced["dtypes"] == ["float32", "bfloat16"]
        assert announced["shapes"] == [[2, 3], [4]]
        assert announced["load_format"] == "flattened_bucket"
        await weights.join(Meeting("meeting-2", "10.0.0.1", 4568, 3, "gloo"), 2)
        assert server.groups == {"meeting-2"}

    with_weights(scenario)


@pytest.mark.parametrize(("changed", "loaded"), [(None, "/w/full"), ("/w/changes", "/w/changes")])
def test_a_folder_is_loaded(changed: str | None, loaded: str) -> None:
    async def scenario(weights: SGLangWeights, server: StandIn) -> None:
        await weights.begin("disk")
        await weights.take(Parcel(TENSORS, folder="/w/full", changed=changed), "disk")
        await weights.end(2)
        assert server.bodies("/update_weights_from_disk")[0]["model_path"] == loaded
        assert "/begin_weight_update" not in server.paths
        assert "/end_weight_update" not in server.paths

    with_weights(scenario)


def test_a_publish_that_failed_half_way_does_not_stop_the_next() -> None:
    async def scenario(weights: SGLangWeights, server: StandIn) -> None:
        await weights.begin("handles")
        await weights.begin("handles")
        await weights.take(Parcel(TENSORS, handles=("x",)), "handles")
        await weights.end(1)
        assert not server.session

    with_weights(scenario)


def test_servers_without_sessions() -> None:
    async def scenario(weights: SGLangWeights, server: StandIn) -> None:
        server.needs_sessions = False
        for version in (1, 2):
            await weights.begin("handles")
            await weights.take(Parcel(TENSORS, handles=("x",)), "handles")
            await weights.end(version)
        assert server.paths.count("/begin_weight_update") == 1
        assert "/end_weight_update" not in server.paths

    with_weights(scenario)


def test_prefixes_that_can_not_be_dropped_are_kept_apart(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(weights: SGLangWeights, server: StandIn) -> None:
        server.faults["/flush_cache"] = 400
        weights.keeps_running = True
        await weights.end(1)
        assert server.paths.count("/flush_cache") == 1
        assert weights.salt == "version 1"
        assert not caplog.records
        weights.keeps_running = False
        await weights.end(2)
        assert server.paths.count("/flush_cache") == 1 + FLUSHES
        assert weights.salt == "version 2"
        assert "kept apart" in caplog.text

    monkeypatch.setattr("paceline.engines.sglang_weights.FLUSH_AGAIN_S", 0.0)
    with_weights(scenario)


@pytest.mark.parametrize(
    ("first", "count", "given", "own"),
    [
        (0, 1, ("a",), ["a"]),
        (2, 2, ("a",), ["a", "a"]),
        (2, 2, ("a", "b", "c", "d"), ["c", "d"]),
        (1, 1, ("a", "b"), ["b"]),
    ],
)
def test_each_device_gets_the_handle_of_its_own(
    first: int, count: int, given: tuple[str, ...], own: list[str]
) -> None:
    async def scenario(weights: SGLangWeights, server: StandIn) -> None:
        await weights.begin("handles")
        await weights.take(Parcel(TENSORS, handles=given), "handles")
        (body,) = server.bodies("/update_weights_from_tensor")
        assert body["serialized_named_tensors"] == own

    with_weights(scenario, first_device=first, num_devices=count)


def test_devices_that_are_not_shared() -> None:
    async def scenario(weights: SGLangWeights, server: StandIn) -> None:
        with pytest.raises(WeightError, match="stands on devices 2 to 3, and the trainer on 2"):
            await weights.take(Parcel(TENSORS, handles=("a", "b")), "handles")
        with pytest.raises(WeightError, match="has none"):
            await weights.take(Parcel(TENSORS), "handles")

    with_weights(scenario, first_device=2, num_devices=2)


def test_pickles_go_to_our_own_servers_only() -> None:
    async def scenario(weights: SGLangWeights, server: StandIn) -> None:
        with pytest.raises(WeightError, match="which go to servers only that were started here"):
            await weights.take(Parcel(TENSORS, handles=("a",)), "handles")
        assert not server.calls

    with_weights(scenario, takes_pickles=False)


def test_a_refusal_names_policy_and_server() -> None:
    async def scenario(weights: SGLangWeights, server: StandIn) -> None:
        server.faults["/update_weights_from_disk"] = 400
        with pytest.raises(WeightError, match=r"policy 'policy', http.*as ordered"):
            await weights.take(Parcel(TENSORS, folder="/w"), "disk")
        server.faults["/update_weights_from_disk"] = "drop"
        with pytest.raises(LostServerError):
            await weights.take(Parcel(TENSORS, folder="/w"), "disk")

    with_weights(scenario)


def test_weights_are_read_back() -> None:
    async def scenario(weights: SGLangWeights, server: StandIn) -> None:
        server.weights = {"a.weight": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]}
        assert await weights.read(TENSORS[0]) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        assert server.bodies("/get_weights_by_name")[0]["truncate_size"] == 2
        assert await weights.read(TENSORS[1]) is None

    with_weights(scenario)
