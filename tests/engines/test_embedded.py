from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from paceline.engines.base import Completion, EmbeddedEngineConfig, Request, Sampling
from paceline.engines.embedded import EmbeddedEngine
from paceline.errors import EngineError, WeightError
from paceline.weights.base import WeightPlan
from paceline.weights.tensors import named_tensors

Serve = Callable[..., Any]

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [3], [12, 13], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]]
GREEDY = Sampling(temperature=0, max_tokens=12)
ENDLESS = Sampling(max_tokens=40, ignore_eos=True)
EVERYTHING: Any = frozenset({"weights", "kv_cache", "graphs"})


def requests_of(prompts: list[list[int]], sampling: Sampling, seed: int = 0) -> list[Request]:
    return [Request(p, sampling, seed=seed + i) for i, p in enumerate(prompts)]


async def answers(engine: EmbeddedEngine, requests: list[Request]) -> list[Completion]:
    return await asyncio.gather(*(engine.generate(r) for r in requests))


def full_logprobs(model: Any, prompt: list[int], answer: list[int], temperature: float) -> Any:
    """Log-probs of an answer by one uncached forward."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0].float() / temperature
    return logits.log_softmax(-1)[torch.arange(len(prompt) - 1, len(prompt + answer) - 1), answer]


@pytest.mark.parametrize("max_batch", [1, 2, 8])
def test_greedy_answers_are_those_of_transformers(serve: Serve, max_batch: int) -> None:
    model = tiny_model()
    found = serve(
        lambda e: answers(e, requests_of(PROMPTS, GREEDY)),
        model,
        max_batch=max_batch,
        eos=frozenset(),
    )
    model.generation_config.eos_token_id = None
    for prompt, answer in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        wanted = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
        )
        assert answer.tokens == wanted[0, len(prompt) :].tolist()
        assert answer.finish == "length"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_a_full_forward(serve: Serve, temperature: float) -> None:
    model = tiny_model()
    sampling = Sampling(temperature=temperature, max_tokens=20)

    async def use(engine: EmbeddedEngine) -> Any:
        found = await answers(engine, requests_of(PROMPTS, sampling))
        scored = await asyncio.gather(
            *(engine.score(p + a.tokens, temperature) for p, a in zip(PROMPTS, found, strict=True))
        )
        return found, scored

    found, scored = serve(use, model, max_batch=3)
    for prompt, answer, score in zip(PROMPTS, found, scored, strict=True):
        wanted = full_logprobs(model, prompt, answer.tokens, temperature)
        assert answer.logprobs == pytest.approx(wanted.tolist(), abs=1e-5)
        assert score[0] == 0.0
        assert score[len(prompt) :] == pytest.approx(wanted.tolist(), abs=1e-5)


def test_an_answer_depends_on_its_seed_and_not_on_the_batch(serve: Serve) -> None:
    requests = requests_of(PROMPTS * 2, Sampling(max_tokens=8))
    requests += requests_of(PROMPTS, Sampling(max_tokens=8, top_p=0.8, repetition_penalty=1.3), 50)
    by_size = [serve(lambda e: answers(e, requests), max_batch=size) for size in (1, 4, 15)]
    reverse = serve(lambda e: answers(e, requests[::-1]), max_batch=3)[::-1]
    tokens = [[a.tokens for a in found] for found in (*by_size, reverse)]
    assert tokens[0] == tokens[1] == tokens[2] == tokens[3]
    assert len({tuple(t) for t in tokens[0]}) == len(requests)


def test_equal_runs_are_equal_to_the_last_bit(serve: Serve) -> None:
    requests = requests_of(PROMPTS * 3, Sampling(max_tokens=10))
    first, second = (serve(lambda e: answers(e, requests), max_batch=4) for _ in range(2))
    assert [a.logprobs for a in first] == [a.logprobs for a in second]


def test_the_prompt_of_a_group_is_computed_once(serve: Serve) -> None:
    group = [[5, 6, 7, 8]] * 9 + [[9, 10, 11]] * 7 + [[12, 13]]

    async def use(engine: EmbeddedEngine) -> Any:
        await answers(engine, requests_of(group, Sampling(max_tokens=6)))
        return engine.counts

    for size in (2, 8, 32):
        counts = serve(use, max_batch=size)
        assert counts.prefill_tokens == 4 + 3 + 2
        assert counts.prompt_tokens == 4 * 9 + 3 * 7 + 2


def test_prompts_ahead_stay_within_the_prefill_budget(serve: Serve) -> None:
    prefills: list[tuple[int, ...]] = []

    async def use(engine: EmbeddedEngine) -> Any:
        inner = engine._model.prefill
        engine._model.prefill = lambda p: (prefills.append(tuple(map(len, p))), inner(p))[1]
        await answers(engine, requests_of([[5] * n for n in (4, 3, 6, 2)], Sampling(max_tokens=2)))

    serve(use, max_batch=1, max_prefill_tokens=8)
    assert prefills == [(4, 3), (6,), (2,)]


def test_a_finished_sequence_frees_its_slot_at_once(serve: Serve) -> None:
    sizes = [2, 9, 3, 3, 2]
    requests = [
        Request([5 + i], Sampling(max_tokens=n, ignore_eos=True), seed=i)
        for i, n in enumerate(sizes)
    ]
    order: list[int] = []

    async def one(engine: EmbeddedEngine, i: int) -> None:
        assert len((await engine.generate(requests[i])).tokens) == sizes[i]
        order.append(i)

    async def use(engine: EmbeddedEngine) -> Any:
        await asyncio.gather(*(one(engine, i) for i in range(5)))
        assert (engine.num_running, engine.num_waiting) == (0, 0)
        return engine.counts

    counts = serve(use, max_batch=2)
    # The second slot decodes 8 steps; the first serves four answers of 1 + 2 + 2 + 1 steps.
    assert (counts.decode_steps, counts.decode_tokens) == (8, 8 + 6)
    assert order == [0, 2, 3, 4, 1]


def test_end_tokens(serve: Serve) -> None:
    [plain] = serve(lambda e: answers(e, [Request([5], ENDLESS, seed=1)]))
    third, fifth = plain.tokens[2], plain.tokens[4]
    assert third not in plain.tokens[:2]

    def ended(eos: set[int], **sampling: Any) -> Completion:
        request = Request([5], Sampling(max_tokens=40, **sampling), seed=1)
        return serve(lambda e: answers(e, [request]), eos=frozenset(eos))[0]

    for answer in (ended({fifth, third}), ended(set(), stop_token_ids=(third, 63))):
        assert (answer.tokens, answer.finish, answer.stop) == (plain.tokens[:3], "stop", third)
        assert answer.logprobs == pytest.approx(plain.logprobs[:3], abs=1e-6)
    assert ended({third}, ignore_eos=True).tokens == plain.tokens
    # Pad is an end token like any other, and nothing special in a prompt.
    padded = Request([0, 5, 0], Sampling(max_tokens=40), seed=1)
    [answer] = serve(lambda e: answers(e, [padded]), eos=frozenset({0, third}))
    wanted = full_logprobs(tiny_model(), [0, 5, 0], answer.tokens, 1.0)
    assert answer.logprobs == pytest.approx(wanted.tolist(), abs=1e-5)


def test_an_end_token_at_the_limit_is_a_stop(serve: Serve) -> None:
    [plain] = serve(lambda e: answers(e, [Request([5], ENDLESS, seed=1)]))
    request = Request([5], Sampling(max_tokens=3), seed=1)
    [answer] = serve(lambda e: answers(e, [request]), eos=frozenset({plain.tokens[2]}))
    assert (answer.finish, answer.stop) == ("stop", plain.tokens[2])


def test_stop_texts_match_across_tokens_and_their_tokens_stay(serve: Serve) -> None:
    tokenizer = tiny_tokenizer()
    [plain] = serve(lambda e: answers(e, [Request([5], ENDLESS, seed=4)]))
    text = tokenizer.decode(plain.tokens[5:8])
    assert text not in tokenizer.decode(plain.tokens[:7])
    sampling = Sampling(max_tokens=40, stop=("never so", text, text + "later"))
    [answer] = serve(lambda e: answers(e, [Request([5], sampling, seed=4)]), eos=frozenset())
    assert (answer.tokens, answer.finish, answer.stop) == (plain.tokens[:8], "stop", text)


def test_the_context_ends_an_answer(serve: Serve) -> None:
    async def use(engine: EmbeddedEngine) -> Any:
        return await asyncio.gather(
            *(engine.generate(Request([5] * n, ENDLESS, seed=0)) for n in (6, 8, 9)),
            engine.generate(Request([], ENDLESS, seed=0)),
            return_exceptions=True,
        )

    fits, full, long, empty = serve(use, max_context=8)
    assert (fits.finish, len(fits.tokens)) == ("length", 2)
    assert (full.finish, full.tokens, full.logprobs, full.versions) == ("length", [], [], [])
    assert isinstance(long, EngineError)
    assert isinstance(empty, EngineError)


def test_bad_scores_are_refused(serve: Serve) -> None:
    async def use(engine: EmbeddedEngine) -> None:
        for tokens, temperature in (([], 1.0), ([5, 64], 1.0), ([5], -1.0)):
            with pytest.raises(EngineError):
                await engine.score(tokens, temperature)
        assert await engine.score([5], 0.0) == [0.0]

    serve(use)


def test_scores_asked_for_together_are_computed_together(serve: Serve) -> None:
    model = tiny_model()
    calls: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(len(kwargs["input_ids"])), with_kwargs=True
    )

    async def use(engine: EmbeddedEngine) -> None:
        calls.clear()
        await asyncio.gather(*(engine.score([5, 6, 7]) for _ in range(6)))

    serve(use, model)
    assert calls == [6]


def copy_plan(model: Any, version: int) -> WeightPlan:
    return WeightPlan("policy", version, "copy", dict(model.named_parameters()))


def test_received_weights_serve_from_the_next_token_on(serve: Serve) -> None:
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    before = {name: p.clone() for name, p in old.named_parameters()}
    requests = requests_of(PROMPTS, Sampling(max_tokens=6))

    async def use(engine: EmbeddedEngine) -> Any:
        first = await answers(engine, requests)
        await engine.pause("finish")
        await engine.receive(copy_plan(new, 4))
        await engine.resume()
        return first, await answers(engine, requests), engine.version

    first, second, version = serve(use, old, weights="copy", version=3)
    assert version == 4
    assert {v for a in first for v in a.versions} == {3}
    assert {v for a in second for v in a.versions} == {4}
    wanted = serve(lambda e: answers(e, requests), new)
    assert [a.tokens for a in second] == [a.tokens for a in wanted]
    assert all(torch.equal(p, before[name]) for name, p in old.named_parameters())


def test_weights_for_another_engine_are_refused(serve: Serve) -> None:
    plans = {
        "shared": [
            WeightPlan("other", 1, "shared"),
            WeightPlan("policy", 1, "shared"),
            WeightPlan("policy", 1, "shared", named_tensors(tiny_model())),
            copy_plan(tiny_model(), 1),
        ],
        "copy": [
            WeightPlan("policy", 1, "shared"),
            WeightPlan("policy", 1, "copy"),
            WeightPlan("policy", 1, "copy", {}),
        ],
    }

    async def use(engine: EmbeddedEngine, bad: list[WeightPlan]) -> int:
        for plan in bad:
            with pytest.raises(WeightError):
                await engine.receive(plan)
        return engine.version

    for weights, bad in plans.items():
        assert serve(lambda e, bad=bad: use(e, bad), weights=weights) == 0


def test_generating_asleep_or_without_weights_is_refused(serve: Serve) -> None:
    # Case 69.
    new = tiny_model(seed=1)
    requests = requests_of(PROMPTS, Sampling(max_tokens=4))

    async def refused(engine: EmbeddedEngine, message: str) -> None:
        with pytest.raises(EngineError, match=message):
            await engine.generate(requests[0])
        with pytest.raises(EngineError, match=message):
            await engine.score([5, 6])

    async def use(engine: EmbeddedEngine) -> Any:
        await answers(engine, requests)
        for _ in range(2):
            await engine.sleep(EVERYTHING)
        assert engine._batch.cache.num_bytes == 0
        assert sum(p.nbytes for p in engine._model.module.parameters()) == 0
        await refused(engine, "asleep")
        with pytest.raises(WeightError, match="asleep"):
            await engine.receive(copy_plan(new, 1))
        for _ in range(2):
            await engine.wake(frozenset({"weights"}))
        await refused(engine, "asleep")
        await engine.wake(EVERYTHING)
        await refused(engine, "none were received")
        await engine.receive(copy_plan(new, 1))
        held = dict(engine._model.module.named_parameters())
        assert all(torch.equal(p, held[name]) for name, p in new.named_parameters())
        return await answers(engine, requests)

    found = serve(use, weights="copy")
    wanted = serve(lambda e: answers(e, requests), new)
    assert [a.tokens for a in found] == [a.tokens for a in wanted]


def test_a_shared_module_is_never_dropped(serve: Serve) -> None:
    model = tiny_model()

    async def use(engine: EmbeddedEngine) -> Any:
        await engine.sleep(EVERYTHING)
        assert sum(p.numel() for p in model.parameters()) > 0
        with pytest.raises(EngineError, match="asleep"):
            await engine.generate(Request([5], GREEDY, seed=0))
        await engine.wake(EVERYTHING)
        return await engine.generate(Request([5], GREEDY, seed=0))

    assert len(serve(use, model).tokens) == 12
    assert sum(p.numel() for p in model.parameters()) > 0


def test_a_shared_module_can_be_trained_between_waves(serve: Serve) -> None:
    model = tiny_model().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    async def use(engine: EmbeddedEngine) -> None:
        for version in range(1, 4):
            requests = requests_of(PROMPTS, Sampling(max_tokens=5), seed=version)
            found = await answers(engine, requests)
            for prompt, answer in zip(PROMPTS, found, strict=True):
                wanted = full_logprobs(model, prompt, answer.tokens, 1.0)
                assert answer.logprobs == pytest.approx(wanted.tolist(), abs=1e-5)
                assert set(answer.versions) == {version - 1}
            assert all(m.training for m in model.modules())
            assert all(p.requires_grad and not p.is_inference() for p in model.parameters())
            model(torch.tensor([PROMPTS[1]])).logits.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            await engine.receive(WeightPlan("policy", version, "shared", named_tensors(model)))

    serve(use, model)


def test_broken_weights_fail_their_requests_and_not_the_engine(serve: Serve) -> None:
    model = tiny_model()
    good = model.model.norm.weight.detach().clone()
    requests = requests_of(PROMPTS, Sampling(max_tokens=4))

    async def use(engine: EmbeddedEngine) -> Any:
        with torch.no_grad():
            model.model.norm.weight.fill_(float("nan"))
        broken = await asyncio.gather(
            *(engine.generate(r) for r in requests), return_exceptions=True
        )
        assert all("not finite" in str(error) for error in broken)
        with torch.no_grad():
            model.model.norm.weight.copy_(good)
        return await answers(engine, requests)

    found = serve(use, model)
    wanted = serve(lambda e: answers(e, requests), tiny_model())
    assert [a.tokens for a in found] == [a.tokens for a in wanted]


def test_low_precision_is_served(serve: Serve) -> None:
    model = tiny_model(dtype=torch.bfloat16)
    found = serve(lambda e: answers(e, requests_of(PROMPTS, Sampling(max_tokens=8))), model)
    for prompt, answer in zip(PROMPTS, found, strict=True):
        wanted = full_logprobs(model, prompt, answer.tokens, 1.0)
        assert np.abs(np.array(answer.logprobs) - wanted.numpy()).mean() < 0.02


def test_warps_hold_over_a_whole_answer(serve: Serve) -> None:
    sampling = Sampling(temperature=2.0, top_k=1, max_tokens=10, repetition_penalty=1000.0)
    [answer] = serve(lambda e: answers(e, [Request([5, 6], sampling, seed=0)]), eos=frozenset())
    # One candidate a step, and none that was seen in the prompt or the answer.
    assert answer.logprobs == [0.0] * 10
    assert len({5, 6, *answer.tokens}) == 12


def test_stop_texts_without_a_tokenizer_are_refused() -> None:
    async def main() -> None:
        engine = EmbeddedEngine(
            EmbeddedEngineConfig(), tiny_model(), None, policy="p", eos_token_ids=frozenset()
        )
        with pytest.raises(EngineError, match="tokenizer"):
            await engine.generate(Request([5], Sampling(stop=("x",)), seed=0))
        await engine.aclose()

    asyncio.run(main())
