"""One replica against a stand-in for its server."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from engines.vllm_stand_in import StandIn, stand_in
from tiny import tiny_tokenizer

from paceline.engines.answers import PAUSED
from paceline.engines.base import Completion, CutSignal, Progress, Request, Sampling
from paceline.engines.http import JsonClient, LostServerError
from paceline.engines.served import Served
from paceline.engines.vllm import PREFIX, VLLMReplica
from paceline.errors import EngineError

GENERATE = "/inference/v1/generate"
SERVED = Served(
    policy="policy",
    eos_token_ids=frozenset({1}),
    max_context=100,
    vocab_size=64,
    tokenizer=tiny_tokenizer(),
    request_timeout_s=20.0,
)


@asynccontextmanager
async def replica_of(
    served: Served = SERVED, *, is_ours: bool = True, **options: Any
) -> AsyncIterator[tuple[VLLMReplica, StandIn]]:
    client = JsonClient()
    async with stand_in(**options) as server:
        replica = VLLMReplica(server.url, client, served, index=0, is_ours=is_ours)
        await replica.weights.state(0)
        server.calls.clear()
        try:
            yield replica, server
        finally:
            await client.aclose()


def with_replica(
    scenario: Callable[[VLLMReplica, StandIn], Awaitable[None]], **options: Any
) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), replica_of(**options) as (replica, server):
            await scenario(replica, server)

    asyncio.run(main())


def request(count: int = 4, prompt: int = 3, **changes: Any) -> Request:
    """A prompt of `prompt` tokens, to be answered with `count`."""
    sampling = changes.pop("sampling", Sampling(max_tokens=count))
    return Request(tokens=[5 + i % 50 for i in range(prompt)], sampling=sampling, seed=7, **changes)


def test_what_is_asked_and_what_comes_back() -> None:
    async def scenario(replica: VLLMReplica, server: StandIn) -> None:
        progress = Progress()
        made = await replica.generate(request(progress=progress))
        assert made.tokens == [10, 11, 12, 13]
        assert made.logprobs == [-0.5] * 4
        assert made.versions == [0] * 4
        assert made.finish == "length"
        assert made.metrics == {"cached_tokens": 2.0}
        assert progress.num_tokens == 4
        (body,) = server.bodies(GENERATE)
        assert body["token_ids"] == [5, 6, 7]
        assert body["sampling_params"] == {
            "max_tokens": 4,
            "temperature": 1.0,
            "seed": 7,
            "logprobs": 0,
            "detokenize": False,
            "stop_token_ids": [1],
        }
        assert "cache_salt" not in body

    with_replica(scenario)


def test_versions_of_an_answer_that_saw_new_weights() -> None:
    async def scenario(replica: VLLMReplica, server: StandIn) -> None:
        answer = asyncio.create_task(replica.generate(request(6)))
        await server.until(1)
        server.advance(2)
        await replica.pause("keep")
        await replica.weights.end(3)
        await replica.resume()
        server.advance(4)
        assert (await answer).versions == [0, 0, 3, 3, 3, 3]
        # Its prefix was computed with former weights, and those that come do not share it.
        later = asyncio.create_task(replica.generate(request(1)))
        await server.until(1)
        server.advance(1)
        await later
        assert server.bodies(GENERATE)[-1]["cache_salt"] == "version 3"

    with_replica(scenario, manual=True)


def test_cancelled_requests_end_at_the_server_and_no_others() -> None:
    async def scenario(replica: VLLMReplica, server: StandIn) -> None:
        tasks = [asyncio.create_task(replica.generate(request(5, 3 + i))) for i in range(10)]
        await server.until(10)
        by_length = {len(r.body["token_ids"]): rid for rid, r in server.running.items()}
        for task in tasks[:4]:
            task.cancel()
        await server.called("/abort_requests", 4)
        await server.until(6)
        aborted = {rid for body in server.bodies("/abort_requests") for rid in body["request_ids"]}
        assert aborted == {by_length[3 + i] for i in range(4)}
        assert all(rid.startswith(PREFIX) for rid in aborted)
        server.advance(5)
        kept = await asyncio.gather(*tasks[4:])
        assert all(made.finish == "length" for made in kept)

    with_replica(scenario, manual=True)


def test_a_cut_keeps_the_tokens_so_far_and_counts_as_length() -> None:
    async def scenario(replica: VLLMReplica, server: StandIn) -> None:
        cut = CutSignal()
        answer = asyncio.create_task(replica.generate(request(9, cut=cut)))
        other = asyncio.create_task(replica.generate(request(9)))
        await server.until(2)
        server.advance(3)
        cut.set()
        made = await answer
        assert (made.tokens, made.finish, made.can_go_on) == ([10, 11, 12], "length", False)
        assert not other.done()
        server.advance(9)
        assert len((await other).tokens) == 9
        assert await replica.generate(request(9, cut=cut)) == Completion([], [], [], "length")

    with_replica(scenario, manual=True)


@pytest.mark.parametrize("is_ours", [True, False])
def test_pausing_with_abort_returns_what_there_is(is_ours: bool) -> None:
    async def scenario(replica: VLLMReplica, server: StandIn) -> None:
        tasks = [asyncio.create_task(replica.generate(request(9))) for _ in range(3)]
        await server.until(3)
        server.advance(2)
        await replica.pause("abort")
        for made in await asyncio.gather(*tasks):
            assert (made.tokens, made.finish, made.cause) == ([10, 11], "abort", PAUSED)
            assert made.can_go_on
        assert server.paused == {"mode": "keep", "clear_cache": "true"}
        assert all((b == {}) is is_ours for b in server.bodies("/abort_requests"))

    with_replica(scenario, manual=True, is_ours=is_ours)


def test_an_abort_by_somebody_else_can_not_be_gone_on_from() -> None:
    async def scenario(replica: VLLMReplica, server: StandIn) -> None:
        answer = asyncio.create_task(replica.generate(request(9)))
        await server.until(1)
        await server.on_abort_requests({})
        made = await answer
        assert (made.finish, made.can_go_on) == ("abort", False)

    with_replica(scenario, manual=True)


@pytest.mark.parametrize(
    ("mode", "clears"), [("keep", "false"), ("recompute", "true"), ("finish", "true")]
)
def test_pauses(mode: Any, clears: str) -> None:
    async def scenario(replica: VLLMReplica, server: StandIn) -> None:
        await replica.pause(mode)
        assert server.paused == {"mode": "keep", "clear_cache": clears}
        await replica.resume()
        assert server.paused is None

    with_replica(scenario)


def test_the_context_limits_the_answer() -> None:
    async def scenario(replica: VLLMReplica, server: StandIn) -> None:
        made = await replica.generate(request(50, 97, sampling=Sampling(max_tokens=50)))
        assert len(made.tokens) == 3
        full = await replica.generate(Request([5] * 100, Sampling(), seed=0))
        assert full == Completion([], [], [], "length")
        with pytest.raises(EngineError, match="has 101 tokens, and the context holds 100"):
            await replica.generate(Request([5] * 101, Sampling(), seed=0))
        with pytest.raises(EngineError, match="100 tokens, and the server takes 99"):
            await replica.score([5] * 100)

    with_replica(scenario)


def test_going_on_with_an_answer() -> None:
    async def scenario(replica: VLLMReplica, server: StandIn) -> None:
        made = await replica.generate(request(10, 8, num_sampled=6))
        assert len(made.tokens) == 4
        over = await replica.generate(request(6, 8, num_sampled=6))
        assert over == Completion([], [], [], "length")
        await replica.generate(request(10, 8))
        rest, whole = (body["sampling_params"]["seed"] for body in server.bodies(GENERATE))
        assert rest != whole == 7

    with_replica(scenario)


@pytest.mark.parametrize(
    ("tokens", "said"), [([], "is empty"), ([5, 64], "from 5 to 64"), ([-1], "from -1 to -1")]
)
def test_tokens_that_would_harm_the_server_are_not_sent(tokens: list[int], said: str) -> None:
    async def scenario(replica: VLLMReplica, server: StandIn) -> None:
        with pytest.raises(EngineError, match=said):
            await replica.generate(Request(tokens, Sampling(), seed=0))
        with pytest.raises(EngineError, match=said):
            await replica.score(tokens)
        assert not server.calls

    with_replica(scenario)


def test_a_refused_request_fails_alone() -> None:
    async def scenario(replica: VLLMReplica, server: StandIn) -> None:
        server.faults[GENERATE] = 400
        with pytest.raises(EngineError, match="refused a request: as ordered") as caught:
            await replica.generate(request())
        assert not isinstance(caught.value, LostServerError)

    with_replica(scenario)


@pytest.mark.parametrize("fault", [500, 503, 429, "drop"])
def test_a_failing_server_is_told_from_a_bad_request(fault: Any) -> None:
    async def scenario(replica: VLLMReplica, server: StandIn) -> None:
        server.faults[GENERATE] = fault
        with pytest.raises(LostServerError) as caught:
            await replica.generate(request())
        assert caught.value.is_cut_off is (fault == "drop")

    with_replica(scenario)


def test_scores() -> None:
    async def scenario(replica: VLLMReplica, server: StandIn) -> None:
        assert await replica.score([5, 6, 7]) == [0.0, -6.0, -7.0]
        with pytest.raises(EngineError, match="at temperature 1 only"):
            await replica.score([5, 6, 7], 0.5)

    with_replica(scenario)


def test_memory_moves_only_where_it_can() -> None:
    async def scenario(replica: VLLMReplica, server: StandIn) -> None:
        await replica.sleep(frozenset({"kv_cache", "graphs"}))
        assert server.paths == ["/pause", "/release_kv_cache_memory"]
        await replica.wake(frozenset({"kv_cache"}))
        assert server.asleep == set()
        await replica.sleep(frozenset({"weights", "kv_cache"}))
        assert server.bodies("/sleep") == [{"level": "2", "mode": "keep"}]
        await replica.wake(frozenset({"weights"}))
        assert server.asleep == {"kv_cache"}
        await replica.wake(frozenset({"kv_cache", "graphs"}))
        # The KV cache goes along with the weights, and comes back with them.
        await replica.sleep(frozenset({"weights"}))
        await replica.wake(frozenset({"weights"}))
        assert server.asleep == set()
        assert server.bodies("/wake_up")[-1] == ["kv_cache", "weights"]

    async def on_a_cpu(replica: VLLMReplica, server: StandIn) -> None:
        await replica.sleep(frozenset({"weights"}))
        await replica.wake(frozenset({"weights"}))
        assert not server.calls

    async def while_it_answers(replica: VLLMReplica, server: StandIn) -> None:
        answer = asyncio.create_task(replica.generate(request()))
        await server.until(1)
        with pytest.raises(EngineError, match="can not keep requests"):
            await replica.sleep(frozenset({"weights"}))
        server.advance(4)
        await answer

    async def while_paused(replica: VLLMReplica, server: StandIn) -> None:
        await replica.pause("finish")
        await replica.sleep(frozenset({"weights"}))
        server.paused = None  # as waking up does
        await replica.wake(frozenset({"weights"}))
        assert server.paused is not None

    moving = dataclasses.replace(SERVED, moves_memory=True)
    with_replica(scenario, served=moving)
    with_replica(on_a_cpu)
    with_replica(while_it_answers, served=moving, manual=True)
    with_replica(while_paused, served=moving)


@pytest.mark.parametrize(
    ("block", "changes", "said"),
    [
        ("parallel_config", {"tensor_parallel_size": 2}, r"set engine\.tensor_parallel = 2"),
        ("parallel_config", {"pipeline_parallel_size": 2}, "pipeline_parallel_size = 2"),
        ("parallel_config", {"worker_extension_cls": ""}, "has no worker extension"),
        ("model_config", {"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
    ],
)
def test_a_server_that_will_not_do(block: str, changes: dict[str, Any], said: str) -> None:
    async def scenario(replica: VLLMReplica, server: StandIn) -> None:
        server.config[block] |= changes
        with pytest.raises(EngineError, match=said):
            await replica.look()

    with_replica(scenario)


def test_a_look_makes_a_token() -> None:
    async def scenario(replica: VLLMReplica, server: StandIn) -> None:
        server.config["model_config"]["max_model_len"] = 50
        await replica.look()
        assert server.paths[-1] == GENERATE
        assert (await replica.generate(request(9, 60))).tokens == []
        server.faults["/server_info"] = 404
        with pytest.raises(EngineError, match=r"is no vLLM server, or was .* with status 404"):
            await replica.look()

    with_replica(scenario)
