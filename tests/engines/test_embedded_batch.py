from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from paceline.engines import embedded_batch
from paceline.engines.base import Request, Sampling
from paceline.engines.embedded_batch import Batch, Job
from paceline.engines.embedded_model import CachedModel
from paceline.engines.embedded_queue import Generation, Intake

INTAKE = Intake(64, 128, frozenset({1}), has_tokenizer=True)
_LOOP: Any = type("Loop", (), {"get_debug": lambda self: False})()


def make_batch(model: Any, max_batch: int, **options: Any) -> Batch:
    return Batch(
        CachedModel(model),
        max_batch=max_batch,
        max_positions=128,
        max_prefill_tokens=options.pop("max_prefill_tokens", 64),
        version=3,
        tokenizer=tiny_tokenizer(),
    )


def generation(prompt: list[int], seed: int, **sampling: Any) -> Generation:
    request = Request(prompt, Sampling(**sampling), seed=seed)
    return INTAKE.generation(request, asyncio.Future(loop=_LOOP))


def run_all(batch: Batch, waiting: list[Generation], rng: np.random.Generator) -> None:
    """Admit a random number at each boundary, cancel some, recompute now and then."""
    while waiting or batch.num_active:
        count = min(batch.num_free, len(waiting), int(rng.integers(0, 4)))
        admit, waiting[:] = waiting[:count], waiting[count:]
        wanted = {g.prompt_key for g in waiting}
        batch.is_interrupted = bool(rng.random() < 0.5)
        batch.run(
            Job(
                admit,
                ahead={g.prompt_key: g.prompt for g in waiting[:2]},
                released={g.prompt_key for g in admit} - wanted,
                recomputes=bool(rng.random() < 0.1),
            )
        )
        for one in admit:
            one.is_cancelled = one.finish is None and bool(rng.random() < 0.2)


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_arrivals_and_ends_leaves_every_answer_right(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = tiny_model()
    batch = make_batch(model, max_batch=4)
    prompts = [rng.integers(2, 64, rng.integers(1, 20)).tolist() for _ in range(8)]
    everyone = [
        generation(
            prompts[rng.integers(8)],
            seed=i,
            max_tokens=int(rng.integers(1, 25)),
            ignore_eos=True,
            repetition_penalty=float(rng.choice([1.0, 1.5])),
        )
        for i in range(30)
    ]
    run_all(batch, list(everyone), rng)
    assert batch._prefixes == {}
    assert batch._seen == {}
    assert 0 < sum(one.is_cancelled for one in everyone) < 15
    for one in everyone:
        if one.is_cancelled:
            assert one.finish is None
            continue
        assert (one.finish, len(one.tokens)) == ("length", one.limit)
        assert one.versions == [3] * one.limit
        if one.request.sampling.repetition_penalty == 1.0:
            ids = torch.tensor([one.prompt.tolist() + one.tokens])
            with torch.no_grad():
                logprobs = model(ids).logits[0].log_softmax(-1)
            rows = torch.arange(len(one.prompt) - 1, ids.shape[1] - 1)
            assert one.logprobs == pytest.approx(logprobs[rows, one.tokens].tolist(), abs=1e-5)


def answers_of_two_groups(batch: Batch, fed: list[int]) -> list[Generation]:
    """Six answers to each of two prompts and three later ones to the first; `fed` gets the rows
    of each forward."""
    embeddings: Any = batch._model.module.get_input_embeddings()  # type: ignore[operator]
    hook = embeddings.register_forward_hook(lambda _, inputs, __: fed.append(len(inputs[0])))
    prompts = [[5, 6, 7], [8, 9]]
    # Cool, so that answers begin alike; one of each prompt is greedy.
    everyone = [
        generation(
            prompts[i % 2],
            seed=i,
            temperature=0.3 if i > 1 else 0.0,
            max_tokens=4 + i,
            ignore_eos=True,
            repetition_penalty=1.2 if i in (2, 3) else 1.0,
        )
        for i in range(12)
    ]
    later = [generation(prompts[0], seed=i, temperature=0.3, max_tokens=8) for i in (4, 20, 21)]
    batch.is_interrupted = True
    batch.run(Job(admit=list(everyone)))
    everyone[7].is_cancelled = True
    batch.run(Job(admit=later))
    batch.is_interrupted = False
    while batch.num_active:
        batch.run(Job())
    hook.remove()
    return [*everyone, *later]


def test_rows_that_are_equal_so_far_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    model.lm_head.weight.data *= 3  # so that answers begin alike, and part
    fed: dict[int, list[int]] = {1: [], 10**9: []}
    found = {}
    for least, sizes in fed.items():
        monkeypatch.setattr(embedded_batch, "MIN_COPIES", least)
        found[least] = answers_of_two_groups(make_batch(model, max_batch=16), sizes)
    shared, plain = found.values()
    # Two prompts; then few rows that differ, where there are 12.
    assert (fed[10**9][:2], fed[1][:2]) == ([2, 12], [2, 3])
    assert sum(fed[1]) < 0.8 * sum(fed[10**9])
    assert [g.tokens for g in shared] == [g.tokens for g in plain]
    assert len({tuple(g.tokens[:4]) for g in shared}) > 8
    for one, other in zip(shared, plain, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_job_makes_a_step_at_least_and_ends_when_interrupted() -> None:
    batch = make_batch(tiny_model(), max_batch=2)
    one = generation([5, 6], seed=0, max_tokens=20, ignore_eos=True)
    batch.is_interrupted = True
    assert batch.run(Job(admit=[one])) == []
    assert len(one.tokens) == 2
    assert batch.run(Job()) == []
    assert len(one.tokens) == 3
    batch.is_interrupted = False
    assert batch.run(Job()) == [one]
    assert (batch.num_active, batch.num_free) == (0, 2)


def test_what_was_dropped_is_computed_anew() -> None:
    texts = []
    for drops in (False, True):
        batch = make_batch(tiny_model(), max_batch=2)
        one = generation([5, 6, 7], seed=0, max_tokens=20, ignore_eos=True)
        batch.is_interrupted = True
        batch.run(Job(admit=[one]))
        before = batch.counts.prefill_tokens
        if drops:
            batch.drop_cache()
        batch.is_interrupted = False
        batch.run(Job())
        assert batch.counts.prefill_tokens - before == (4 if drops else 0)
        texts.append(one.tokens)
    assert texts[0] == texts[1]


def test_clear_returns_what_ran() -> None:
    batch = make_batch(tiny_model(), max_batch=4)
    running = [generation([5 + i], seed=i, max_tokens=20, ignore_eos=True) for i in range(3)]
    batch.is_interrupted = True
    batch.run(Job(admit=running))
    assert batch.clear() == running
    assert batch.num_active == 0
    assert batch.run(Job()) == []
