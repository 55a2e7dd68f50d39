"""A real SGLang server on a CPU, for tests that are marked slow."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from paceline.engines.base import Request, Sampling, SGLangEngineConfig
from paceline.engines.router import RoutedEngine
from paceline.engines.sglang_open import open_sglang
from paceline.models import ModelConfig, export_model
from paceline.weights.base import Transport, WeightPlan
from paceline.weights.source import LocalSource, Outbox

ROOT = Path(__file__).parent.parent.parent
START_S = 240.0


def sglang_python() -> str:
    """Skips the test where there is no SGLang, unless it must be there."""
    python = ROOT / ".venv-sglang/bin/python"
    if not python.exists():
        if os.environ.get("PACELINE_REQUIRE_SGLANG"):
            pytest.fail(f"{python} is not there: run scripts/setup-sglang")
        pytest.skip("needs a real SGLang: run scripts/setup-sglang (2.5 GB)")
    return str(python)


def config(**changes: Any) -> SGLangEngineConfig:
    settings: dict[str, Any] = {
        "python": sglang_python(),
        "device": "cpu",
        "env": {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        "kv_cache_tokens": 4096,
        "max_running": 16,
        "start_timeout_s": START_S,
    }
    return SGLangEngineConfig(**(settings | changes))


def sglang_options() -> tuple[str, ...]:
    """Keys of a run file, for servers that the run starts."""
    return (
        "engine.kind=sglang",
        f"engine.python={sglang_python()}",
        "engine.device=cpu",
        "engine.kv_cache_tokens=4096",
        "engine.max_running=16",
        'engine.env={HF_HUB_OFFLINE = "1", OMP_NUM_THREADS = "1"}',
    )


@asynccontextmanager
async def real_engine(folder: Path, **changes: Any) -> AsyncIterator[RoutedEngine]:
    """Of the tiny model with seed 0."""
    model = folder / "model"
    if not model.exists():
        export_model(tiny_model(), tiny_tokenizer(), model)
    engine = await open_sglang(
        config(**changes),
        ModelConfig(path=str(model)),
        tiny_tokenizer(),
        policy="policy",
        folder=folder / "logs",
    )
    try:
        yield engine
    finally:
        await engine.aclose()


class Moment:
    """When to act, so as to meet answers under way: sought, since servers are quick or slow.

    for delay_s in moment: act after it, and break if it met them; else say what it was.
    """

    def __init__(self) -> None:
        self._low, self._high, self._delay = 0.0, float("inf"), 0.1

    def __iter__(self) -> Iterator[float]:
        for _ in range(16):
            yield self._delay

    def was(self, *, late: bool) -> None:
        """The answers had come to their end, or had not begun."""
        if late:
            self._high = self._delay
        else:
            self._low = self._delay
        is_bounded = self._high < float("inf")
        self._delay = (self._low + self._high) / 2 if is_bounded else 2 * self._delay


class RealServer:
    """An engine that lives in an event loop of its own, for several tests."""

    def __init__(self, folder: Path, open_engine: Any = None, **changes: Any) -> None:
        """open_engine: another one than `real_engine`."""
        self.runner = asyncio.Runner()
        self.context = (open_engine or real_engine)(folder, **changes)
        self.engine = self.runner.run(self.context.__aenter__())
        self.folder = folder

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = 90.0) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(timeout_s):
                return await work

        return self.runner.run(bounded())

    def close(self) -> None:
        try:
            self.runner.run(self.context.__aexit__(None, None, None))
        finally:
            self.runner.close()


class Weights:
    """The sending end of a trainer that holds a tiny model."""

    def __init__(self, folder: Path, **shape: int) -> None:
        """shape: of the tiny model."""
        self._shape = shape
        self.model = tiny_model(**shape)
        self._folder = folder
        self._outbox = Outbox(
            lambda: [(n, p.detach()) for n, p in self.model.named_parameters()],
            write_config=self.model.config.save_pretrained,
            timeout_s=60,
        )

    def become(self, seed: int) -> None:
        """Learn, so to speak."""
        self.model.load_state_dict(tiny_model(seed, **self._shape).state_dict())

    def plan(self, version: int, transport: Transport) -> WeightPlan:
        plan = WeightPlan(
            "policy", version, transport, bucket_bytes=20_000, folder=self._folder / "weights"
        )

        async def run(work: Callable[[], Any]) -> Any:
            return await asyncio.to_thread(work)

        source = LocalSource(self._outbox, plan, run)
        return WeightPlan(
            "policy", version, transport, source=source, bucket_bytes=plan.bucket_bytes,
            folder=plan.folder,
        )  # fmt: skip

    def close(self) -> None:
        self._outbox.dispose()


known_model = functools.cache(tiny_model)


def logprobs(seed: int, tokens: list[int], temperature: float = 1.0, **shape: int) -> list[float]:
    """Of each token given those before it, by the model of this seed; 0.0 for the first."""
    with torch.no_grad():
        logits_TV = (
            known_model(seed, **shape)(torch.tensor([tokens])).logits[0].double() / temperature
        )
        table_TV = torch.log_softmax(logits_TV, -1)
    return [0.0, *(table_TV[t - 1, tokens[t]].item() for t in range(1, len(tokens)))]


def request(count: int = 12, seed: int = 0, **changes: Any) -> Request:
    sampling = Sampling(max_tokens=count, **changes)
    return Request([5, 6, 7 + seed % 20], sampling, seed=seed, group="group")
