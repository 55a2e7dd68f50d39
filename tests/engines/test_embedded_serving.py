from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from paceline.engines.base import Completion, EmbeddedEngineConfig, Request, Sampling
from paceline.engines.embedded import EmbeddedEngine
from paceline.errors import EngineError
from paceline.weights.base import WeightPlan
from paceline.weights.tensors import named_tensors

Serve = Callable[..., Any]

LONG = Sampling(max_tokens=30, ignore_eos=True)


def request(seed: int, max_tokens: int = 30) -> Request:
    prompt = [5 + seed % 3, 9, 8]
    return Request(prompt, Sampling(max_tokens=max_tokens, ignore_eos=True), seed=seed)


def started(engine: EmbeddedEngine, requests: list[Request]) -> list[asyncio.Task[Completion]]:
    return [asyncio.create_task(engine.generate(r)) for r in requests]


async def uncached(model: Any, prompt: list[int], answer: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0]
    rows = torch.arange(len(prompt) - 1, len(prompt + answer) - 1)
    return logits.log_softmax(-1)[rows, answer].tolist()


def test_a_wave_is_admitted_together_however_it_arrives(serve: Serve) -> None:
    async def late(engine: EmbeddedEngine, i: int) -> Completion:
        for _ in range(i):
            await asyncio.sleep(0)
        return await engine.generate(request(i, max_tokens=5))

    async def use(engine: EmbeddedEngine) -> int:
        await asyncio.gather(*(late(engine, i) for i in range(6)))
        return engine.counts.decode_steps

    assert serve(use, max_batch=6) == 4


def test_who_comes_next_turn_is_admitted_at_the_same_boundary(serve: Serve) -> None:
    async def episode(engine: EmbeddedEngine, i: int) -> None:
        for _ in range(3):
            await engine.generate(request(i, max_tokens=4))

    async def use(engine: EmbeddedEngine) -> int:
        await asyncio.gather(*(episode(engine, i) for i in range(4)))
        return engine.counts.decode_steps

    assert serve(use, max_batch=4) == 3 * 3


def test_the_event_loop_stays_free_while_tokens_are_made(serve: Serve, step_gate: Any) -> None:
    model = tiny_model()

    async def use(engine: EmbeddedEngine) -> None:
        gate = step_gate(model, at=2)
        [task] = started(engine, [request(0)])
        await gate.during()  # the loop runs although a step is held
        assert len((await task).tokens) == 30

    serve(use, model)


def test_cancelling_frees_the_slot_and_the_place_in_the_queue(serve: Serve, step_gate: Any) -> None:
    # Case 63.
    model = tiny_model()

    async def use(engine: EmbeddedEngine) -> None:
        gate = step_gate(model, at=3)
        tasks = started(engine, [request(i) for i in range(6)])

        async def cancel() -> None:
            assert (engine.num_running, engine.num_waiting) == (2, 4)
            for i in (0, 3, 4):
                tasks[i].cancel()

        await gate.during(cancel())
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(e, asyncio.CancelledError) for e in ended] == [
            True, False, False, True, True, False,
        ]  # fmt: skip
        assert all(len(ended[i].tokens) == 30 for i in (1, 2, 5))
        assert (engine.num_running, engine.num_waiting) == (0, 0)
        # 29 steps for 1 beside the first part of 2, the rest of 2 beside 5, the rest of 5.
        assert engine.counts.decode_tokens == 3 + 3 * 29
        assert engine._batch._prefixes == {}

    serve(use, model, max_batch=2)


def test_pause_finish_lets_running_ones_end_and_admits_none(serve: Serve, step_gate: Any) -> None:
    model = tiny_model()

    async def use(engine: EmbeddedEngine) -> None:
        gate = step_gate(model, at=3)
        tasks = started(engine, [request(i) for i in range(3)])
        [pause] = await gate.during(engine.pause("finish"))
        await pause
        assert [t.done() for t in tasks] == [True, True, False]
        assert (engine.num_running, engine.num_waiting) == (0, 1)
        late = asyncio.create_task(engine.generate(request(3)))
        await engine.receive(WeightPlan("policy", 1, "shared", named_tensors(model)))
        await engine.resume()
        await engine.resume()
        found = [await t for t in (*tasks, late)]
        assert [set(c.versions) for c in found] == [{0}, {0}, {1}, {1}]
        assert all(len(c.tokens) == 30 for c in found)

    serve(use, model, max_batch=2)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
@pytest.mark.parametrize("drops_cache", [False, True])
def test_pause_keep_and_recompute_freeze_and_go_on_under_new_weights(
    serve: Serve, step_gate: Any, mode: Any, drops_cache: bool
) -> None:
    # Case 67: 16 requests in flight, none aborted.
    old, new = tiny_model(seed=0), tiny_model(seed=1)

    async def use(engine: EmbeddedEngine) -> list[Completion]:
        gate = step_gate(engine._model.module, at=9)
        tasks = started(engine, [request(i) for i in range(16)])
        [pause] = await gate.during(engine.pause(mode))
        await pause
        assert engine.num_running == 16
        if drops_cache:
            await engine.sleep(frozenset({"kv_cache"}))
            await engine.wake(frozenset({"kv_cache"}))
        await engine.receive(WeightPlan("policy", 7, "copy", dict(new.named_parameters())))
        assert not any(t.done() for t in tasks)
        await engine.resume()
        return await asyncio.gather(*tasks)

    found = serve(use, old, max_batch=16, weights="copy")
    for i, answer in enumerate(found):
        assert (answer.finish, len(answer.tokens)) == ("length", 30)
        assert answer.versions == [0] * 10 + [7] * 20
        prompt = list(request(i).tokens)
        before = asyncio.run(uncached(old, prompt, answer.tokens))
        after = asyncio.run(uncached(new, prompt, answer.tokens))
        assert answer.logprobs[:10] == pytest.approx(before[:10], abs=1e-5)
        is_new_throughout = answer.logprobs[10:] == pytest.approx(after[10:], abs=1e-5)
        assert is_new_throughout == (mode == "recompute" or drops_cache)


def test_pause_abort_ends_all_with_what_they_have(serve: Serve, step_gate: Any) -> None:
    model = tiny_model()

    async def use(engine: EmbeddedEngine) -> None:
        gate = step_gate(model, at=4)
        tasks = started(engine, [request(i) for i in range(4)])
        [pause] = await gate.during(engine.pause("abort"))
        await pause
        found = [t.result() for t in tasks]
        assert [c.finish for c in found] == ["abort"] * 4
        assert [len(c.tokens) for c in found] == [5, 5, 0, 0]
        assert all(len(c.logprobs) == len(c.versions) == len(c.tokens) for c in found)
        assert all("abort" in (c.cause or "") for c in found)
        assert (engine.num_running, engine.num_waiting) == (0, 0)
        late = asyncio.create_task(engine.generate(request(5)))
        await asyncio.sleep(0)
        await engine.resume()
        assert (await late).finish == "length"

    serve(use, model, max_batch=2)


def test_an_idle_engine_pauses_at_once_in_every_mode(serve: Serve) -> None:
    async def use(engine: EmbeddedEngine) -> None:
        for mode in ("finish", "keep", "recompute", "abort", "finish"):
            await engine.pause(mode)
        await engine.resume()
        assert len((await engine.generate(request(0))).tokens) == 30

    serve(use)


def test_a_pause_that_is_overtaken_by_resume_says_so(serve: Serve, step_gate: Any) -> None:
    model = tiny_model()

    async def use(engine: EmbeddedEngine) -> None:
        gate = step_gate(model, at=2)
        [task] = started(engine, [request(0)])
        pause, _ = await gate.during(engine.pause("finish"), engine.resume())
        with pytest.raises(EngineError, match="resumed before"):
            await pause
        assert len((await task).tokens) == 30

    serve(use, model)


def test_no_prefix_is_used_across_versions(serve: Serve, step_gate: Any) -> None:
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    group = [Request([5, 6, 7], LONG, seed=i) for i in range(6)]

    async def use(engine: EmbeddedEngine) -> list[Completion]:
        gate = step_gate(engine._model.module, at=2)
        tasks = started(engine, group)
        [pause] = await gate.during(engine.pause("finish"))
        await pause
        await engine.receive(WeightPlan("policy", 1, "copy", dict(new.named_parameters())))
        await engine.resume()
        found = await asyncio.gather(*tasks)
        assert engine.counts.prefill_tokens == 3 + 3
        return found

    found = serve(use, old, max_batch=2, weights="copy")
    for answer in found[2:]:
        wanted = asyncio.run(uncached(new, [5, 6, 7], answer.tokens))
        assert answer.logprobs == pytest.approx(wanted, abs=1e-5)


def test_running_requests_forbid_sleep(serve: Serve, step_gate: Any) -> None:
    model = tiny_model()

    async def use(engine: EmbeddedEngine) -> None:
        gate = step_gate(model, at=2)
        tasks = started(engine, [request(0)])
        [sleep] = await gate.during(engine.sleep(frozenset({"kv_cache"})))
        with pytest.raises(EngineError, match="pause it first"):
            await sleep
        await asyncio.gather(*tasks)

    serve(use, model)


def test_a_forward_that_fails_reaches_every_caller_at_once(serve: Serve) -> None:
    # Case 59.
    model = tiny_model()
    failure = RuntimeError("device on fire")

    async def use(engine: EmbeddedEngine) -> None:
        def fail(_: Any, args: Any, kwargs: Any) -> None:
            if engine.counts.decode_steps == 3:
                raise failure

        model.register_forward_pre_hook(fail, with_kwargs=True)
        tasks = started(engine, [request(i) for i in range(5)])
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            assert isinstance(error, EngineError)
            assert error.__cause__ is failure
            assert "device on fire" in str(error)
        for call in (
            engine.generate(request(0)),
            engine.score([5, 6]),
            engine.pause("keep"),
            engine.receive(WeightPlan("policy", 1, "shared")),
        ):
            with pytest.raises(EngineError, match="device on fire") as caught:
                await call
            assert caught.value.__cause__ is failure
        assert (engine.num_running, engine.num_waiting) == (0, 0)

    serve(use, model, max_batch=2)


def test_scoring_that_fails_fails_its_callers_alone(serve: Serve) -> None:
    model = tiny_model()

    async def use(engine: EmbeddedEngine) -> None:
        def fail(_: Any, args: Any, kwargs: Any) -> None:
            if kwargs["use_cache"] is False:
                raise RuntimeError("out of memory")

        hook = model.register_forward_pre_hook(fail, with_kwargs=True)
        scores = await asyncio.gather(
            *(engine.score([5, 6]) for _ in range(2)), return_exceptions=True
        )
        assert ["out of memory" in str(error) for error in scores] == [True, True]
        hook.remove()
        assert len((await engine.generate(request(0))).tokens) == 30
        assert len(await engine.score([5, 6])) == 2

    serve(use, model)


def test_closing_fails_what_is_open_and_is_idempotent(serve: Serve, step_gate: Any) -> None:
    model = tiny_model()

    async def use(engine: EmbeddedEngine) -> None:
        gate = step_gate(model, at=2)
        tasks = started(engine, [request(i) for i in range(3)])
        [close] = await gate.during(engine.aclose())
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(e, EngineError) and "closed" in str(e) for e in ended)
        await close
        await engine.aclose()
        assert engine._batch.cache.num_bytes == 0
        for call in (engine.generate(request(0)), engine.resume(), engine.sleep(frozenset())):
            with pytest.raises(EngineError, match="closed"):
                await call

    serve(use, model, max_batch=2)


def make_engine() -> EmbeddedEngine:
    return EmbeddedEngine(
        EmbeddedEngineConfig(),
        tiny_model(),
        tiny_tokenizer(),
        policy="policy",
        eos_token_ids=frozenset(),
    )


def test_one_engine_serves_one_event_loop_after_another() -> None:
    engine = make_engine()
    first = asyncio.run(engine.generate(request(0)))
    second = asyncio.run(engine.generate(request(0)))
    assert first.tokens == second.tokens
    asyncio.run(engine.aclose())


def test_an_event_loop_that_ends_with_requests_open_leaves_nothing_behind(
    step_gate: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    async def abandon(engine: EmbeddedEngine) -> None:
        gate = step_gate(engine._model.module, at=2)
        tasks = started(engine, [request(i) for i in range(2)])
        tasks.append(asyncio.create_task(engine.score([5, 6])))
        await gate.during()

    def use() -> None:
        engine = make_engine()
        asyncio.run(abandon(engine))
        assert (engine.num_running, engine.num_waiting) == (0, 0)
        assert len(asyncio.run(engine.generate(request(0))).tokens) == 30
        asyncio.run(engine.aclose())

    use()
    gc.collect()
    assert capfd.readouterr().err == ""


def test_closing_an_engine_that_was_never_used() -> None:
    asyncio.run(make_engine().aclose())
