"""Making the engine that a run file names, in this process or in servers of its own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from paceline.build.parts import Text, model_settings
from paceline.build.site import Site, engine_name
from paceline.config import RunFile
from paceline.engines.base import (
    EmbeddedEngineConfig,
    Engine,
    ServedEngineConfig,
    SGLangEngineConfig,
    VLLMEngineConfig,
)
from paceline.engines.embedded import EmbeddedEngine
from paceline.engines.sglang_open import open_sglang
from paceline.engines.turns import Turns
from paceline.engines.vllm_open import open_vllm
from paceline.errors import ConfigError
from paceline.trainers.base import SingleTrainerConfig
from paceline.weights.base import BUCKET_BYTES, Transport, WeightPlan

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel


Served = TypeVar("Served", bound=ServedEngineConfig)


async def open_engine(
    run_file: RunFile,
    model: PreTrainedModel,
    text: Text,
    site: Site,
    *,
    policy: str,
    transport: Transport,
    turns: Turns | None = None,
    weights: Path | None = None,
    is_published_to: bool = True,
) -> Engine:
    """The engine of a policy; owned by the site. model: served here if the engine is embedded.

    weights: folder that servers take theirs from, in the place of the one of `[model]`.
    is_published_to: a trainer sends weights before anything is sampled.
    """
    match run_file.engine:
        case EmbeddedEngineConfig():
            embedded = make_engine(
                run_file, model, text, policy=policy, transport=transport, turns=turns
            )
            site.disposer.add(engine_name(policy), embedded.aclose)
            return embedded
        case SGLangEngineConfig() as sglang:
            open_served = partial(open_sglang, _over(sglang, transport))
        case VLLMEngineConfig() as vllm:
            open_served = partial(open_vllm, _over(vllm, transport))
    settings = model_settings(run_file, weights)
    if settings.adapter is not None and not is_published_to:
        raise ConfigError(
            f"model.adapter = {run_file.model.adapter!r}: servers load the folder `model.path` "
            "alone, and nothing is published to them here; merge the adapter into a model folder "
            'and name that, or write engine.kind = "embedded"'
        )
    served = await open_served(
        settings,
        text.tokenizer,
        policy=policy,
        launch=None if run_file.engine.urls else site.launcher(policy),
        folder=site.logs,
        seed=run_file.run.seed,
        moves_memory=run_file.memory.order != "none",
    )
    site.disposer.add(engine_name(policy), served.aclose)
    return served


def _over(config: Served, transport: Transport) -> Served:
    return config.model_copy(update={"weights": transport})


def make_engine(
    run_file: RunFile,
    model: PreTrainedModel,
    text: Text,
    *,
    policy: str,
    transport: Transport,
    turns: Turns | None = None,
    version: int = 0,
) -> EmbeddedEngine:
    """An engine in this process. version: of the weights that the model holds now."""
    config = run_file.engine
    assert isinstance(config, EmbeddedEngineConfig)
    own = "shared" if transport == "shared" else "copy"
    return EmbeddedEngine(
        config.model_copy(update={"weights": own}),
        model,
        text.tokenizer,
        policy=policy,
        eos_token_ids=text.end_ids,
        version=version,
        turns=turns,
    )


def route_of(run_file: RunFile, policy: str) -> WeightPlan:
    """How weights travel to the engine of a policy: a plan without a version."""
    engine, transport = run_file.engine, transport_of(run_file)
    dtype = None if engine.dtype in ("model", run_file.model.dtype) else engine.dtype
    bucket_bytes = BUCKET_BYTES
    if isinstance(engine, ServedEngineConfig):
        bucket_bytes = engine.bucket_mb << 20
    folder = run_file.run_dir / "weights" / policy if transport == "disk" else None
    return WeightPlan(policy, 0, transport, bucket_bytes=bucket_bytes, folder=folder, dtype=dtype)


def transport_of(run_file: RunFile) -> Transport:
    """How weights come from the trainer to the engine.

    `auto` shares storage where trainer and engine are in this process and never work at one time:
    in the sync driver. Between processes it takes memory that both can map where they share
    devices, or a CPU host.
    """
    engine, is_here = run_file.engine, isinstance(run_file.trainer, SingleTrainerConfig)
    if isinstance(engine, EmbeddedEngineConfig):
        if not is_here:
            return "handles"
        if engine.weights == "auto":
            return "copy" if run_file.is_multi or engine.dtype != "model" else "shared"
        return engine.weights
    if engine.weights != "auto":
        return engine.weights
    shares_memory = run_file.cluster.colocate and run_file.cluster.runtime == "local"
    return "handles" if shares_memory and not engine.urls else "collective"
