"""An engine for the time of one asynchronous function, and a gate that stops it at a step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tiny import tiny_model, tiny_tokenizer
from torch import nn

from paceline.engines.base import EmbeddedEngineConfig
from paceline.engines.embedded import EmbeddedEngine

EOS = 1
DEADLINE_S = 20.0


def run_engine(
    use: Callable[[EmbeddedEngine], Awaitable[Any]],
    model: nn.Module | None = None,
    *,
    eos: frozenset[int] = frozenset({EOS}),
    version: int = 0,
    **config: Any,
) -> Any:
    """Run `use(engine)` in an event loop of its own; the engine is closed whatever happens."""

    async def main() -> Any:
        engine = EmbeddedEngine(
            EmbeddedEngineConfig(**config),
            tiny_model() if model is None else model,
            tiny_tokenizer(),
            policy="policy",
            eos_token_ids=eos,
            version=version,
        )
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await use(engine)
        finally:
            await engine.aclose()

    return asyncio.run(main())


class StepGate:
    """Holds the worker thread inside the decode step number `at`, counted from 1."""

    def __init__(self, model: nn.Module, at: int) -> None:
        self._left = at
        self._opened = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._reached = asyncio.Event()
        model.register_forward_pre_hook(self._hook, with_kwargs=True)

    def _hook(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].shape[1] != 1 or kwargs.get("attention_mask") is None:
            return
        self._left -= 1
        if self._left == 0:
            self._loop.call_soon_threadsafe(self._reached.set)
            assert self._opened.wait(DEADLINE_S)

    async def during(self, *actions: Awaitable[Any]) -> list[asyncio.Task[Any]]:
        """Start the actions while the step is held, then let it go on; returns their tasks."""
        await self._reached.wait()
        tasks = [asyncio.ensure_future(action) for action in actions]
        for _ in range(5):  # a cancellation takes a turn more than a call
            await asyncio.sleep(0)
        self._opened.set()
        return tasks


@pytest.fixture
def serve() -> Callable[..., Any]:
    return run_engine


@pytest.fixture
def step_gate() -> type[StepGate]:
    return StepGate
