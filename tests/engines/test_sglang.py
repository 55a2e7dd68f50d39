"""One replica against a stand-in for its server."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from engines.sglang_server import StandIn, stand_in
from tiny import tiny_tokenizer

from paceline.engines.answers import PAUSED
from paceline.engines.base import Completion, CutSignal, Progress, Request, Sampling
from paceline.engines.http import JsonClient, LostServerError
from paceline.engines.served import Served
from paceline.engines.sglang import SGLangReplica
from paceline.errors import EngineError

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
) -> AsyncIterator[tuple[SGLangReplica, StandIn]]:
    client = JsonClient()
    async with stand_in(**options) as server:
        replica = SGLangReplica(server.url, client, served, index=0, is_ours=is_ours)
        try:
            yield replica, server
        finally:
            await client.aclose()


def with_replica(
    scenario: Callable[[SGLangReplica, StandIn], Awaitable[None]], **options: Any
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
    async def scenario(replica: SGLangReplica, server: StandIn) -> None:
        progress = Progress()
        made = await replica.generate(request(progress=progress))
        assert made.tokens == [10, 11, 12, 13]
        assert made.logprobs == [-0.5] * 4
        assert made.versions == [0] * 4
        assert made.finish == "length"
        assert progress.num_tokens == 4
        (body,) = server.bodies("/generate")
        assert body["input_ids"] == [5, 6, 7]
        assert body["sampling_params"] == {
            "max_new_tokens": 4,
            "temperature": 1.0,
            "sampling_seed": 7,
            "stop_token_ids": [1],
        }
        assert body["return_logprob"] is True

    with_replica(scenario)


def test_all_of_the_sampling_reaches_the_server() -> None:
    async def scenario(replica: SGLangReplica, server: StandIn) -> None:
        sampling = Sampling(
            temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2,
            max_tokens=9, stop=("ab",), stop_token_ids=(4,),
        )  # fmt: skip
        await replica.generate(request(sampling=sampling))
        await replica.generate(request(sampling=Sampling(max_tokens=9, ignore_eos=True)))
        first, second = (body["sampling_params"] for body in server.bodies("/generate"))
        assert first == {
            "max_new_tokens": 9, "temperature": 0.7, "sampling_seed": 7, "top_p": 0.9,
            "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "stop_token_ids": [1, 4],
            "stop": ["ab"], "skip_special_tokens": False,
        }  # fmt: skip
        assert second["ignore_eos"] is True
        assert "stop_token_ids" not in second

    with_replica(scenario)


def test_each_request_has_an_id_of_its_own() -> None:
    async def scenario(replica: SGLangReplica, server: StandIn) -> None:
        await asyncio.gather(*(replica.generate(request()) for _ in range(20)))
        assert len({body["rid"] for body in server.bodies("/generate")}) == 20

    with_replica(scenario)


def test_versions_of_an_answer_that_saw_new_weights() -> None:
    async def scenario(replica: SGLangReplica, server: StandIn) -> None:
        answer = asyncio.create_task(replica.generate(request(6)))
        await server.until(1)
        server.advance(2)
        await replica.pause("keep")
        await replica.weights.state(3)
        await replica.resume()
        server.advance(4)
        assert (await answer).versions == [0, 0, 3, 3, 3, 3]

    with_replica(scenario, manual=True)


def test_servers_that_name_one_version_give_all_tokens_the_one_at_the_start() -> None:
    async def scenario(replica: SGLangReplica, server: StandIn) -> None:
        await replica.weights.state(2)
        answer = asyncio.create_task(replica.generate(request(6)))
        await server.until(1)
        server.advance(2)
        await replica.weights.state(3)
        server.advance(4)
        assert (await answer).versions == [2] * 6

    with_replica(scenario, manual=True, has_spans=False)


def test_cancelled_requests_end_at_the_server_and_no_others() -> None:
    async def scenario(replica: SGLangReplica, server: StandIn) -> None:
        tasks = [asyncio.create_task(replica.generate(request(5, 3 + i))) for i in range(10)]
        await server.until(10)
        by_length = {len(r.body["input_ids"]): rid for rid, r in server.running.items()}
        for task in tasks[:4]:
            task.cancel()
        later = asyncio.create_task(replica.generate(request(5, 20)))
        await server.called("/abort_request", 4)
        await server.until(7)
        aborted = {body["rid"] for body in server.bodies("/abort_request")}
        assert aborted == {by_length[3 + i] for i in range(4)}
        server.advance(5)
        kept = await asyncio.gather(*tasks[4:], later)
        assert all(made.finish == "length" for made in kept)

    with_replica(scenario, manual=True)


def test_a_cut_keeps_the_tokens_so_far_and_counts_as_length() -> None:
    async def scenario(replica: SGLangReplica, server: StandIn) -> None:
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


def test_a_cut_is_asked_for_until_the_server_knows_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(replica: SGLangReplica, server: StandIn) -> None:
        cut = CutSignal()
        answer = asyncio.create_task(replica.generate(request(9, cut=cut)))
        await server.until(1)
        hidden = dict(server.running)
        server.running.clear()  # as if the request were still on its way
        cut.set()
        await server.called("/abort_request", 2)
        assert not answer.done()
        server.running |= hidden
        assert (await answer).finish == "length"

    monkeypatch.setattr("paceline.engines.open_requests.ABORT_AGAIN_S", 0.01)
    with_replica(scenario, manual=True)


@pytest.mark.parametrize("is_ours", [True, False])
def test_pausing_with_abort_returns_what_there_is(is_ours: bool) -> None:
    async def scenario(replica: SGLangReplica, server: StandIn) -> None:
        tasks = [asyncio.create_task(replica.generate(request(9))) for _ in range(3)]
        await server.until(3)
        server.advance(2)
        await replica.pause("abort")
        for made in await asyncio.gather(*tasks):
            assert (made.tokens, made.finish, made.cause) == ([10, 11], "abort", PAUSED)
            assert made.can_go_on
        assert server.paused == "retract"
        assert all(b["abort_all"] is is_ours for b in server.bodies("/abort_request"))

    with_replica(scenario, manual=True, is_ours=is_ours)


def test_an_abort_by_somebody_else_can_not_be_gone_on_from() -> None:
    async def scenario(replica: SGLangReplica, server: StandIn) -> None:
        answer = asyncio.create_task(replica.generate(request(9)))
        await server.until(1)
        await server.on_abort_request({"abort_all": True})
        made = await answer
        assert (made.finish, made.can_go_on) == ("abort", False)
        assert made.cause == "Abort in server"

    with_replica(scenario, manual=True)


@pytest.mark.parametrize(
    ("mode", "asked"), [("keep", "in_place"), ("recompute", "retract"), ("finish", "retract")]
)
def test_pauses(mode: Any, asked: str) -> None:
    async def scenario(replica: SGLangReplica, server: StandIn) -> None:
        await replica.pause(mode)
        assert server.paused == asked
        await replica.resume()
        assert server.paused is None

    with_replica(scenario)


def test_the_context_limits_the_answer() -> None:
    async def scenario(replica: SGLangReplica, server: StandIn) -> None:
        made = await replica.generate(request(50, 97, sampling=Sampling(max_tokens=50)))
        assert len(made.tokens) == 3
        full = await replica.generate(Request([5] * 100, Sampling(), seed=0))
        assert full == Completion([], [], [], "length")
        with pytest.raises(EngineError, match="has 101 tokens, and the context holds 100"):
            await replica.generate(Request([5] * 101, Sampling(), seed=0))

    with_replica(scenario)


def test_going_on_with_an_answer_counts_what_it_has() -> None:
    async def scenario(replica: SGLangReplica, server: StandIn) -> None:
        made = await replica.generate(request(10, 8, num_sampled=6))
        assert len(made.tokens) == 4
        over = await replica.generate(request(6, 8, num_sampled=6))
        assert over == Completion([], [], [], "length")

    with_replica(scenario)


@pytest.mark.parametrize(
    ("tokens", "said"), [([], "is empty"), ([5, 64], "from 5 to 64"), ([-1], "from -1 to -1")]
)
def test_tokens_that_would_harm_the_server_are_not_sent(tokens: list[int], said: str) -> None:
    async def scenario(replica: SGLangReplica, server: StandIn) -> None:
        with pytest.raises(EngineError, match=said):
            await replica.generate(Request(tokens, Sampling(), seed=0))
        with pytest.raises(EngineError, match=said):
            await replica.score(tokens)
        assert not server.calls

    with_replica(scenario)


def test_a_refused_request_fails_alone() -> None:
    async def scenario(replica: SGLangReplica, server: StandIn) -> None:
        server.faults["/generate"] = 400
        with pytest.raises(EngineError, match="refused a request: as ordered") as caught:
            await replica.generate(request())
        assert caught.value.__cause__ is None
        assert not isinstance(caught.value, LostServerError)

    with_replica(scenario)


@pytest.mark.parametrize("fault", [500, 503, 429, "drop"])
def test_a_failing_server_is_told_from_a_bad_request(fault: Any) -> None:
    async def scenario(replica: SGLangReplica, server: StandIn) -> None:
        server.faults["/generate"] = fault
        with pytest.raises(LostServerError) as caught:
            await replica.generate(request())
        assert caught.value.is_cut_off is (fault == "drop")

    with_replica(scenario)


def test_a_request_that_takes_too_long_is_ended_at_the_server() -> None:
    async def scenario(replica: SGLangReplica, server: StandIn) -> None:
        with pytest.raises(LostServerError, match=r"did not answer /generate within 0\.2 s"):
            await replica.generate(request())
        await server.called("/abort_request")
        await server.until(0)

    served = dataclasses.replace(SERVED, request_timeout_s=0.2)
    with_replica(scenario, served=served, manual=True)


def test_scores() -> None:
    async def scenario(replica: SGLangReplica, server: StandIn) -> None:
        assert await replica.score([5, 6, 7]) == [0.0, -6.0, -7.0]
        with pytest.raises(EngineError, match="at temperature 1 only"):
            await replica.score([5, 6, 7], 0.5)

    with_replica(scenario)


def test_memory_moves_only_where_it_can() -> None:
    async def scenario(replica: SGLangReplica, server: StandIn) -> None:
        await replica.sleep(frozenset({"weights", "kv_cache"}))
        await replica.wake(frozenset({"graphs"}))
        assert server.bodies("/release_memory_occupation") == [{"tags": ["kv_cache", "weights"]}]
        assert server.bodies("/resume_memory_occupation") == [{"tags": ["cuda_graph"]}]

    async def on_a_cpu(replica: SGLangReplica, server: StandIn) -> None:
        await replica.sleep(frozenset({"weights"}))
        await replica.wake(frozenset({"weights"}))
        assert not server.calls

    with_replica(scenario, served=dataclasses.replace(SERVED, moves_memory=True))
    with_replica(on_a_cpu)


def test_a_server_of_another_shape_is_refused() -> None:
    async def scenario(replica: SGLangReplica, server: StandIn) -> None:
        server.info["tp_size"] = 2
        with pytest.raises(EngineError, match=r"set engine\.tensor_parallel = 2"):
            await replica.look()
        server.info = {"tp_size": 1, "max_req_input_len": 50}
        await replica.look()
        assert (await replica.generate(request(9, 60))).tokens == []

    with_replica(scenario)
