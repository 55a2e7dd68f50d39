"""What the contract suite of engines needs of each: an engine of the tiny model, and new weights.

A new engine is one more entry of `MAKERS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import sglang_real, vllm_real
from engines.sglang_real import logprobs
from tiny import tiny_model, tiny_tokenizer

from paceline.engines.base import EmbeddedEngineConfig
from paceline.engines.embedded import EmbeddedEngine
from paceline.weights.base import Parcel, PauseMode, WeightPlan
from paceline.weights.buckets import describe
from paceline.weights.check import check_weights, reset_weights
from paceline.weights.publish import publish
from paceline.weights.settings import EXACT, WeightCheckConfig
from paceline.weights.source import LocalSource, Outbox

EOS = 1
CONTEXT = 128
NAMES = [name for name, _ in tiny_model().named_parameters()]
"""Of tensors, whatever the shape."""


@asynccontextmanager
async def embedded(folder: Path) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(
        EmbeddedEngineConfig(weights="copy", max_batch=16),
        tiny_model(),
        tiny_tokenizer(),
        policy="policy",
        eos_token_ids=frozenset({EOS}),
    )
    try:
        yield engine
    finally:
        await engine.aclose()


@dataclass(frozen=True)
class Maker:
    open: Callable[[Path], AbstractAsyncContextManager[Any]]
    marks: tuple[pytest.MarkDecorator, ...] = ()
    scores_at_temperatures: bool = True
    is_seeded: bool = True
    """Equal seeds and weights give equal answers, whatever else is asked for."""
    shape: dict[str, Any] = field(default_factory=dict)
    """Of the tiny model, where it is not the usual one."""


def server_marks(group: str) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group(group))


MAKERS = {
    "embedded": Maker(embedded),
    "sglang": Maker(
        sglang_real.real_engine,
        server_marks("sglang"),
        scores_at_temperatures=False,
        is_seeded=False,
    ),
    "vllm": Maker(
        vllm_real.real_engine,
        server_marks("vllm"),
        scores_at_temperatures=False,
        shape=vllm_real.SHAPE,
    ),
}
MAKER_PARAMS = [pytest.param(maker, marks=maker.marks, id=name) for name, maker in MAKERS.items()]


class Sender:
    """Publishes the tiny model of a seed, if asked to with a fault on the way."""

    def __init__(self) -> None:
        self.model: Any = None
        self._outboxes: list[Outbox] = []

    async def send(self, plan: WeightPlan) -> WeightPlan:
        return replace(plan, source=self._source(plan, self.tensors))

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(n, p.detach()) for n, p in self.model.named_parameters()]

    def _source(
        self, plan: WeightPlan, tensors: Callable[[], list[tuple[str, torch.Tensor]]]
    ) -> LocalSource:
        outbox = Outbox(tensors, timeout_s=60)
        self._outboxes.append(outbox)

        async def run(work: Callable[[], Any]) -> Any:
            return await asyncio.to_thread(work)

        return LocalSource(outbox, plan, run)

    def close(self) -> None:
        for outbox in self._outboxes:
            outbox.dispose()


class Faulty(Sender):
    """What it sends differs from what it says that it has."""

    def __init__(
        self, *, lost: Sequence[str] = (), claims: bool = False, rounds: bool = False
    ) -> None:
        """lost: tensors that do not travel. claims: parcels name them all the same. rounds: to
        bfloat16, and back."""
        super().__init__()
        self.lost, self.claims, self.rounds = lost, claims, rounds

    async def send(self, plan: WeightPlan) -> WeightPlan:
        whole = self._source(plan, self.tensors)
        extra = [describe(n, t) for n, t in self.tensors() if n in self.lost and self.claims]
        return replace(plan, source=_Claimed(whole, self._source(plan, self._sent), extra))

    def _sent(self) -> list[tuple[str, torch.Tensor]]:
        kept = [(n, t) for n, t in self.tensors() if n not in self.lost]
        return [(n, t.bfloat16().float()) for n, t in kept] if self.rounds else kept


class _Claimed:
    def __init__(self, whole: LocalSource, part: LocalSource, extra: list[Any]) -> None:
        self._whole, self._part, self._extra = whole, part, tuple(extra)

    async def parcels(self) -> AsyncIterator[Parcel]:
        async for parcel in self._part.parcels():
            yield replace(parcel, tensors=(*parcel.tensors, *self._extra))

    async def checksums(self) -> Mapping[str, str]:
        return await self._whole.checksums()

    async def numbers(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        return await self._whole.numbers(names)


class Subject:
    """An engine in an event loop of its own, for several tests."""

    def __init__(self, maker: Maker, folder: Path) -> None:
        self.maker = maker
        self.runner = asyncio.Runner()
        self._context = maker.open(folder)
        self.engine = self.runner.run(self._context.__aenter__())
        self.seed = 0
        """Of the weights that it serves."""

    def run(self, work: Any, timeout_s: float = 90.0) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(timeout_s):
                return await work

        return self.runner.run(bounded())

    def logprobs(self, seed: int, tokens: list[int], temperature: float = 1.0) -> list[float]:
        """What the model of this seed says of each token; 0.0 for the first."""
        return logprobs(seed, tokens, temperature, **self.maker.shape)

    async def publish(
        self,
        seed: int,
        *,
        mode: PauseMode = "finish",
        sender: Sender | None = None,
        check: WeightCheckConfig = EXACT,
    ) -> int:
        """The next version; weights are compared, unless `check.when` is `never`."""
        sender, version = sender or Sender(), self.engine.version + 1
        sender.model = tiny_model(seed, **self.maker.shape)
        plan = WeightPlan("policy", version, "handles", bucket_bytes=20_000)
        try:
            await publish(
                sender,
                {"engine": self.engine},
                plan,
                pause=mode,
                reset=_with(reset_weights, check) if check.reset else None,
                verify=_with(check_weights, check) if check.when != "never" else None,
                deadline_s=60,
            )
        finally:
            sender.close()
        self.seed = seed
        return version

    def close(self) -> None:
        self.runner.run(self._context.__aexit__(None, None, None))
        self.runner.run(self.engine.aclose())
        self.runner.close()


def _with(step: Callable[..., Any], check: WeightCheckConfig) -> Callable[..., Any]:
    return lambda receiver, plan: step(receiver, plan, check)
