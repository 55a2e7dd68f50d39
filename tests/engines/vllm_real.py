"""A real vLLM server on a CPU, for tests that are marked slow."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from engines.sglang_real import ROOT, START_S
from tiny import tiny_model, tiny_tokenizer

from paceline.engines.base import VLLMEngineConfig
from paceline.engines.router import RoutedEngine
from paceline.engines.vllm_open import open_vllm
from paceline.models import ModelConfig, export_model

SHAPE = {"hidden": 128}
"""Of the model: vLLM's attention on a CPU has heads of 32, 64, ... numbers."""


def vllm_python() -> str:
    """Skips the test where there is no vLLM, unless it must be there."""
    python = ROOT / ".venv-vllm/bin/python"
    if not python.exists():
        if os.environ.get("PACELINE_REQUIRE_VLLM"):
            pytest.fail(f"{python} is not there: run scripts/setup-vllm")
        pytest.skip("needs a real vLLM: run scripts/setup-vllm (3.5 GB)")
    return str(python)


def config(**changes: Any) -> VLLMEngineConfig:
    settings: dict[str, Any] = {
        "python": vllm_python(),
        "device": "cpu",
        "env": {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        "kv_cache_tokens": 4096,
        "max_running": 16,
        "start_timeout_s": START_S,
    }
    return VLLMEngineConfig(**(settings | changes))


@asynccontextmanager
async def real_engine(folder: Path, **changes: Any) -> AsyncIterator[RoutedEngine]:
    """Of the tiny model with seed 0."""
    model = folder / "model"
    if not model.exists():
        export_model(tiny_model(**SHAPE), tiny_tokenizer(), model)
    engine = await open_vllm(
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
