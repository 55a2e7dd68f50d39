"""Captured decode steps: sizes, filling rows, and when graphs are dropped. Capture is a replay of
the recorded work on its static inputs, as a CUDA graph is; on a GPU the real thing is tested."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tiny import tiny_model

from paceline.engines.base import EmbeddedEngineConfig, Request, Sampling
from paceline.engines.embedded import EmbeddedEngine
from paceline.engines.embedded_graphs import DecodeGraphs, rounded_rows

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("rows", "most", "expected"),
    [(1, 64, 1), (3, 64, 4), (33, 64, 64), (33, 48, 48), (65, 512, 128), (500, 512, 512)],
)
def test_rows_are_rounded_up_but_not_beyond_the_slots(rows: int, most: int, expected: int) -> None:
    assert rounded_rows(rows, most) == expected


class Work:
    """A forward that tells what it was given, and a capture that counts."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.captures = 0

    def forward(self, inputs_3N: torch.Tensor, longest: int) -> torch.Tensor:
        self.calls.append((inputs_3N.shape[1], longest))
        return (inputs_3N[0] * 100 + inputs_3N[1])[:, None].float()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        return work


def step(graphs: DecodeGraphs, tokens: list[int], position: int) -> list[float]:
    count = len(tokens)
    inputs = np.stack((tokens, np.full(count, position), np.arange(count) * 128 + position))
    return graphs.step(inputs, position + 1, 128)[:, 0].tolist()


def test_a_size_is_captured_when_it_is_met_again_and_then_replayed() -> None:
    work = Work()
    graphs = DecodeGraphs(work.forward, CPU, 8, lambda: work.capture)
    for tokens in ([1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1]):
        expected = [100.0 * token + 10 for token in tokens]
        assert step(graphs, tokens, 10) == expected
    assert work.captures == graphs.num_graphs == 1
    assert set(work.calls) == {(4, 64), (2, 64)}


def test_filling_rows_write_into_free_slots_only() -> None:
    seen: list[torch.Tensor] = []

    def forward(inputs_3N: torch.Tensor, longest: int) -> torch.Tensor:
        seen.append(inputs_3N.clone())
        return torch.zeros(inputs_3N.shape[1], 4)

    graphs = DecodeGraphs(forward, CPU, 8, lambda: lambda work: work)
    step(graphs, [5, 6, 7, 8, 9], 3)
    assert seen[0][2].tolist() == [3, 131, 259, 387, 515, 640, 768, 896]
    assert seen[0][1].tolist() == [3] * 5 + [0] * 3


def test_moved_memory_drops_the_graphs() -> None:
    work = Work()
    graphs = DecodeGraphs(work.forward, CPU, 8, lambda: work.capture)
    for signature in (1, 1, 2, 2):
        graphs.check(signature)
        step(graphs, [1], 5)
    assert work.captures == 2
    graphs.drop()
    assert graphs.num_graphs == 0


def test_what_can_not_be_captured_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    work = Work()
    graphs = DecodeGraphs(work.forward, CPU, 8, lambda: refuse)
    for _ in range(4):
        assert step(graphs, [1], 5) == [105.0]
    assert caplog.text.count("can not be captured") == 1


def answers(engine: EmbeddedEngine) -> list[tuple[list[int], list[float]]]:
    async def body() -> list[tuple[list[int], list[float]]]:
        requests = [
            Request([3, 4, 5 + i], Sampling(max_tokens=5 + 7 * i, ignore_eos=True), seed=i)
            for i in range(7)
        ]
        found = await asyncio.gather(*(engine.generate(request) for request in requests))
        await engine.aclose()
        return [(one.tokens, one.logprobs) for one in found]

    return asyncio.run(body())


def make(graphs: bool, device: str = "cpu") -> EmbeddedEngine:
    config = EmbeddedEngineConfig(max_batch=4, weights="copy", graphs=graphs)
    model = tiny_model(dtype=torch.float64).to(device)
    return EmbeddedEngine(config, model, None, policy="p", eos_token_ids=frozenset({1}))


def test_answers_are_those_without_graphs() -> None:
    plain, captured = make(False), make(True)
    batch = captured._batch
    batch._graphs = DecodeGraphs(
        lambda inputs, longest: batch._model.step(batch.cache, inputs, longest),
        CPU,
        4,
        lambda: lambda work: work,
    )
    wanted, found = answers(plain), answers(captured)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, one), (_, other) in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=1e-9)


def test_rows_move_only_when_the_step_gets_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EmbeddedEngineConfig(max_batch=16, weights="copy")
    settings = [
        Sampling(
            max_tokens=3 + 5 * (i * 7 % 16),
            ignore_eos=True,
            temperature=float(i % 3),
            repetition_penalty=1.0 + 0.25 * (i % 2),
        )
        for i in range(16)
    ]

    async def body(captured: bool) -> tuple[list[tuple[list[int], list[float]]], list[int]]:
        model = tiny_model(dtype=torch.float64)
        engine = EmbeddedEngine(config, model, None, policy="p", eos_token_ids=frozenset({1}))
        batch, moves = engine._batch, []
        if captured:
            batch._graphs = DecodeGraphs(
                lambda inputs, longest: batch._model.step(batch.cache, inputs, longest),
                CPU,
                16,
                lambda: lambda work: work,
            )
        move = batch.cache.move
        monkeypatch.setattr(
            batch.cache, "move", lambda *given: (moves.append(len(given[0])), move(*given))
        )
        requests = [Request([3, 4, 5 + i], s, seed=i) for i, s in enumerate(settings)]
        found = await asyncio.gather(*(engine.generate(request) for request in requests))
        await engine.aclose()
        return [(one.tokens, one.logprobs) for one in found], moves

    wanted, often = asyncio.run(body(captured=False))
    found, seldom = asyncio.run(body(captured=True))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, one), (_, other) in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=1e-9)
    assert len(often) > 8
    assert len(seldom) <= 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_real_graphs_give_the_same_answers_before_and_after_new_weights() -> None:
    wanted, engine = answers(make(False, "cuda")), make(True, "cuda")
    found = answers(engine)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    assert engine._batch._graphs is not None
    assert not engine._batch._graphs.is_broken


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_real_graphs_are_captured_again_after_the_cache_has_moved() -> None:
    engine = make(True, "cuda")
    graphs = engine._batch._graphs
    assert graphs is not None

    async def body() -> None:
        for length in (20, 90, 20):
            requests = [
                Request([3, 4, 5 + i], Sampling(max_tokens=length, ignore_eos=True), seed=i)
                for i in range(4)
            ]
            await asyncio.gather(*(engine.generate(request) for request in requests))
            assert graphs.num_graphs > 0
            assert not graphs.is_broken
            await engine.pause("finish")
            await engine.sleep(frozenset({"graphs", "kv_cache"}))
            assert graphs.num_graphs == 0
            await engine.wake(frozenset({"graphs", "kv_cache"}))
            await engine.resume()
        await engine.aclose()

    asyncio.run(body())
