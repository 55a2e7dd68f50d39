"""The weight check that an SGLang server has itself, against a stand-in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from engines.sglang_server import StandIn, stand_in

from paceline.engines.http import JsonClient
from paceline.engines.sglang_check import NEVER_SENT, skipped
from paceline.engines.sglang_weights import SGLangWeights
from paceline.errors import WeightError
from paceline.weights.settings import EXACT, WeightCheckConfig

Scenario = Callable[[SGLangWeights, "Checker"], Awaitable[None]]
UNEQUAL = (
    "check tensor equality failed:\nname=model.norm.weight max_abs_err=0.5 expect=raw()\n"
    "name=model.layers.0.qkv_proj.weight max_abs_err=1.0 "
)


class Checker(StandIn):
    """Knows some of the actions; others it refuses with a reason."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses: dict[str, str] = {}

    async def on_weights_checker(self, body: Any) -> Any:
        reason = self.refuses.get(body["action"])
        answer = {"success": reason is None, "message": reason or "Success."}
        return web.json_response(answer, status=200 if reason is None else 400)

    @property
    def actions(self) -> list[str]:
        return [body["action"] for body in self.bodies("/weights_checker")]


def with_weights(scenario: Scenario, *, compares: bool = True) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), stand_in(Checker) as server:
            client = JsonClient()
            weights = SGLangWeights(
                server.url, client, policy="policy", first_device=0, num_devices=1, timeout_s=5.0,
                takes_pickles=True, compares=compares,
            )  # fmt: skip
            weights.held = 4
            try:
                await scenario(weights, server)
            finally:
                await client.aclose()

    asyncio.run(main())


def test_weights_that_come_back_are_compared_with_a_snapshot() -> None:
    async def scenario(weights: SGLangWeights, server: Checker) -> None:
        check = WeightCheckConfig(reset=True, skip=("*.rotary.*",))
        await weights.reset(4, check)
        assert await weights.compare(check) == []
        assert server.actions == ["snapshot", "reset_tensors", "compare"]
        _, reset, compare = server.bodies("/weights_checker")
        assert reset["skip_tensor_list"] == compare["skip_tensor_list"] == [*NEVER_SENT, ".rotary."]
        assert compare["allow_quant_error"] is False
        # A snapshot serves once.
        assert await weights.compare(check) is None

    with_weights(scenario)


def test_what_differs_is_named_as_the_server_names_it() -> None:
    async def scenario(weights: SGLangWeights, server: Checker) -> None:
        check = WeightCheckConfig(reset=True, tolerance=0.05)
        server.refuses["compare"] = UNEQUAL
        await weights.reset(4, check)
        assert await weights.compare(check) == [
            "model.norm.weight", "model.layers.0.qkv_proj.weight"
        ]  # fmt: skip
        assert server.bodies("/weights_checker")[-1]["allow_quant_error"] is True

    with_weights(scenario)


@pytest.mark.parametrize(
    ("version", "compares", "check", "refuses"),
    [
        (5, True, EXACT, {}),
        (4, False, EXACT, {}),
        (4, True, WeightCheckConfig(only=("*norm*",)), {}),
        (4, True, EXACT, {"snapshot": "no memory"}),
        (4, True, EXACT, {"compare": "Torch not compiled with CUDA enabled"}),
    ],
    ids=["other weights come", "on a CPU", "some only", "no snapshot", "no comparison"],
)
def test_where_the_server_can_not_tell(
    version: int, compares: bool, check: WeightCheckConfig, refuses: dict[str, str]
) -> None:
    async def scenario(weights: SGLangWeights, server: Checker) -> None:
        server.refuses = refuses
        await weights.reset(version, check)
        assert await weights.compare(check) is None
        assert "reset_tensors" in server.actions

    with_weights(scenario, compares=compares)


def test_a_server_that_does_not_reset() -> None:
    async def scenario(weights: SGLangWeights, server: Checker) -> None:
        server.refuses["reset_tensors"] = "unknown action"
        with pytest.raises(WeightError, match=r"policy 'policy', http.*unknown action.*reset"):
            await weights.reset(4, EXACT)

    with_weights(scenario)


def test_patterns_become_what_a_name_contains() -> None:
    check = WeightCheckConfig(skip=("*.mlp.*.weight", "lm_head.weight", "*", "*.[01].k*"))
    assert skipped(check) == [*NEVER_SENT, ".weight", "lm_head.weight", ".k"]
