"""Copies of the served weights, each with an engine of its own, for evals beside training."""

from __future__ import annotations

from collections.abc import Callable

from paceline.engines.embedded import EmbeddedEngine


class EngineSnapshots:
    """Implements `paceline.evals.dispatch.Snapshots`: `make` builds an engine with a copy."""

    def __init__(self, make: Callable[[], EmbeddedEngine]) -> None:
        self._make = make

    async def take(self, step: int) -> EmbeddedEngine:
        return self._make()

    async def retire(self, snapshot: EmbeddedEngine) -> None:
        await snapshot.aclose()
