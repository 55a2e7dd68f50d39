"""Answers that are ended early keep what they have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tiny import tiny_model

from paceline.engines.base import Completion, CutSignal, Request, Sampling
from paceline.engines.embedded import EmbeddedEngine

Serve = Callable[..., Any]


def request(seed: int, cut: CutSignal | None = None) -> Request:
    prompt = [5 + seed % 3, 9, 8]
    return Request(prompt, Sampling(max_tokens=30, ignore_eos=True), seed=seed, cut=cut)


def started(engine: EmbeddedEngine, requests: list[Request]) -> list[asyncio.Task[Completion]]:
    return [asyncio.create_task(engine.generate(r)) for r in requests]


async def set_signal(cut: CutSignal) -> None:
    cut.set()
    cut.set()


def test_a_cut_answer_keeps_its_tokens_log_probs_and_versions(serve: Serve, step_gate: Any) -> None:
    """Case 44. One runs, one waits for a slot; their neighbours are as if there had been no cut."""
    model = tiny_model()

    async def use(engine: EmbeddedEngine) -> list[Completion]:
        whole = [await engine.generate(request(i)) for i in range(4)]
        cut = CutSignal()
        gate = step_gate(model, at=3)
        tasks = started(engine, [request(i, cut if i in (0, 2) else None) for i in range(4)])
        await gate.during(set_signal(cut))
        found = [await task for task in tasks]
        assert [len(c.tokens) for c in found] == [4, 30, 0, 30]
        assert [c.finish for c in found] == ["length"] * 4
        for part, complete in zip(found, whole, strict=True):
            assert part.tokens == complete.tokens[: len(part.tokens)]
            assert part.logprobs == pytest.approx(complete.logprobs[: len(part.tokens)], abs=1e-5)
            assert part.versions == [7] * len(part.tokens)
        assert (engine.num_running, engine.num_waiting) == (0, 0)
        assert engine._batch._prefixes == {}
        late = await engine.generate(request(0, cut))
        assert late.tokens == []
        return found

    serve(use, model, max_batch=2, version=7)


def test_a_cut_while_paused_is_delivered_after_it(serve: Serve, step_gate: Any) -> None:
    model = tiny_model()

    async def use(engine: EmbeddedEngine) -> None:
        cut = CutSignal()
        gate = step_gate(model, at=2)
        tasks = started(engine, [request(i, cut) for i in range(3)])
        [pause] = await gate.during(engine.pause("keep"))
        await pause
        cut.set()
        await engine.resume()
        found = [await task for task in tasks]
        assert [len(c.tokens) for c in found] == [3, 3, 0]

    serve(use, model, max_batch=2)


def test_a_signal_is_heard_at_once_or_never_after_its_block() -> None:
    cut, heard = CutSignal(), []
    with cut.listening(lambda: heard.append("first")):
        pass
    with cut.listening(lambda: heard.append("second")):
        cut.set()
        cut.set()
    with cut.listening(lambda: heard.append("late")):
        assert heard == ["second", "late"]
