"""New weights for one server, against a stand-in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from engines.vllm_stand_in import Running, StandIn, stand_in

from paceline.engines.http import JsonClient, LostServerError
from paceline.engines.replica import OwnCheck
from paceline.engines.vllm_weights import VLLMWeights
from paceline.errors import WeightError
from paceline.weights.base import Meeting, Parcel, TensorInfo
from paceline.weights.settings import WeightCheckConfig

TENSORS = (TensorInfo("a.weight", "float32", (2, 3)), TensorInfo("b.weight", "bfloat16", (4,)))
MEETING = Meeting("meeting-1", "10.0.0.1", 4567, 3, "gloo")


def with_weights(
    scenario: Callable[[VLLMWeights, StandIn], Awaitable[None]], **changes: Any
) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), stand_in() as server:
            client = JsonClient()
            options: dict[str, Any] = {
                "policy": "policy", "first_device": 0, "num_devices": 1, "timeout_s": 5.0,
                "takes_pickles": True,
            }  # fmt: skip
            try:
                await scenario(VLLMWeights(server.url, client, **(options | changes)), server)
            finally:
                await client.aclose()

    asyncio.run(main())


def values(server: StandIn, method: str) -> list[Any]:
    return [b["args"] for b in server.bodies("/collective_rpc") if b["method"] == method]


def test_the_order_of_a_publish_by_handles() -> None:
    async def scenario(weights: VLLMWeights, server: StandIn) -> None:
        await weights.begin("handles")
        await weights.take(Parcel(TENSORS, handles=("first",)), "handles")
        await weights.take(Parcel(TENSORS, handles=("second",)), "handles")
        assert weights.held == 0
        await weights.end(5)
        take = "paceline_take_handles"
        assert server.methods == ["paceline_begin", take, take, "paceline_end"]
        assert server.paths[-2:] == ["/reset_prefix_cache", "/update_weight_version"]
        assert values(server, take) == [[["first"]], [["second"]]]
        assert (server.version, weights.held, await weights.version()) == ("5", 5, 5)
        assert weights.salt is None

    with_weights(scenario)


def test_a_broadcast_is_announced() -> None:
    async def scenario(weights: VLLMWeights, server: StandIn) -> None:
        await weights.join(MEETING, 2)
        await weights.begin("collective")
        await weights.take(Parcel(TENSORS), "collective")
        meeting = {
            "name": "meeting-1", "address": "10.0.0.1", "port": 4567, "size": 3, "backend": "gloo",
        }  # fmt: skip
        assert values(server, "paceline_join") == [[meeting, 2, 5.0]]
        announced = [["a.weight", "float32", [2, 3]], ["b.weight", "bfloat16", [4]]]
        assert values(server, "paceline_take_broadcast") == [[announced, 5.0]]

    with_weights(scenario)


@pytest.mark.parametrize("changed", [None, "/w/changes"])
def test_a_folder_is_loaded(changed: str | None) -> None:
    async def scenario(weights: VLLMWeights, server: StandIn) -> None:
        await weights.take(Parcel(TENSORS, folder="/w/full", changed=changed), "disk")
        assert values(server, "paceline_take_folder") == [["/w/full", changed]]
        with pytest.raises(WeightError, match="is empty"):
            await weights.take(Parcel(TENSORS), "disk")

    with_weights(scenario)


def test_each_device_gets_the_handle_of_its_own() -> None:
    async def scenario(weights: VLLMWeights, server: StandIn) -> None:
        await weights.take(Parcel(TENSORS, handles=("a", "b", "c", "d")), "handles")
        await weights.take(Parcel(TENSORS, handles=("a",)), "handles")
        assert values(server, "paceline_take_handles") == [[["c", "d"]], [["a", "a"]]]
        with pytest.raises(WeightError, match="stands on devices 2 to 3, and the trainer on 2"):
            await weights.take(Parcel(TENSORS, handles=("a", "b")), "handles")

    with_weights(scenario, first_device=2, num_devices=2)


def test_pickles_go_to_our_own_servers_only() -> None:
    async def scenario(weights: VLLMWeights, server: StandIn) -> None:
        with pytest.raises(WeightError, match="which go to servers only that were started here"):
            await weights.take(Parcel(TENSORS, handles=("a",)), "handles")
        assert not server.calls

    with_weights(scenario, takes_pickles=False)


def test_prefixes_that_can_not_be_dropped_are_kept_apart() -> None:
    async def scenario(weights: VLLMWeights, server: StandIn) -> None:
        weights.keeps_running = True
        await weights.end(1)
        assert "/reset_prefix_cache" not in server.paths
        assert weights.salt == "version 1"
        weights.keeps_running = False
        server.running["other"] = Running({"sampling_params": {"max_tokens": 1}})
        await weights.end(2)
        assert weights.salt == "version 2"
        server.running.clear()

    with_weights(scenario)


def test_a_problem_names_policy_and_server() -> None:
    async def scenario(weights: VLLMWeights, server: StandIn) -> None:
        server.problems["paceline_end"] = "ValueError: weights of 2 layers did not come"
        with pytest.raises(WeightError, match=r"policy 'policy', http.*2 layers did not come"):
            await weights.end(3)
        assert weights.held == 0
        assert "/update_weight_version" not in server.paths
        server.faults["/collective_rpc"] = 404
        with pytest.raises(WeightError, match=r"policy 'policy', http.*as ordered"):
            await weights.begin("disk")
        server.faults["/collective_rpc"] = "drop"
        with pytest.raises(LostServerError):
            await weights.begin("disk")

    with_weights(scenario)


def test_weights_are_read_back_and_reset() -> None:
    async def scenario(weights: VLLMWeights, server: StandIn) -> None:
        server.weights = {"a.weight": [([2, 3], [1.0, 2.0, 3.0, 4.0, 5.0, 0.1])]}
        found = await weights.read(TENSORS[0])
        assert found == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0, 0.1])
        assert values(server, "paceline_read") == [["a.weight"]]
        assert await weights.read(TENSORS[1]) is None
        assert isinstance(weights, OwnCheck)
        check = WeightCheckConfig(skip=("b.*",))
        await weights.reset(1, check)
        assert values(server, "paceline_reset") == [[["b.*"]]]
        assert await weights.compare(check) is None

    with_weights(scenario)


def test_a_server_that_was_told_no_version() -> None:
    async def scenario(weights: VLLMWeights, server: StandIn) -> None:
        assert await weights.version() is None
        server.faults["/weight_info"] = 404
        assert await weights.version() is None

    with_weights(scenario)


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ([([1, 2], [1, 2]), ([1, 2], [3, 4])], [1, 2, 3, 4]),
        ([([2, 1], [1, 2]), ([2, 1], [3, 4])], [1, 3, 2, 4]),
        ([([2, 2], [1, 2, 3, 4]), ([2, 2], [1, 2, 3, 4])], [1, 2, 3, 4]),
        ([([2, 2], [1, 2, 3, 4]), ([2, 2], [0, 0, 0, 0])], [0, 0, 0, 0]),
        ([([3, 2], [1, 2, 3, 4, 5, 6])], [1, 2, 3, 4]),
        ([([1, 3], [1, 2, 3])], None),
        ([([4], [1, 2, 3, 4])], None),
    ],
)
def test_parts_of_a_tensor_on_several_devices(parts: Any, whole: Any) -> None:
    """Rows, columns, or all of it; embeddings with rows beyond those of the checkpoint."""

    async def scenario(weights: VLLMWeights, server: StandIn) -> None:
        server.weights = {"w": parts}
        assert await weights.read(TensorInfo("w", "float32", (2, 2))) == whole

    with_weights(scenario)
