"""Making an engine of vLLM servers: started here, or attached to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.engines.base import VLLMEngineConfig
from paceline.engines.router import RoutedEngine
from paceline.engines.served import device_of, served_model
from paceline.engines.server import Launcher, ServerCommand
from paceline.engines.suppliers import client_with, key_for, open_servers
from paceline.engines.vllm import VLLMReplica
from paceline.engines.vllm_launch import vllm_command
from paceline.models import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


async def open_vllm(
    config: VLLMEngineConfig,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    policy: str,
    version: int = 0,
    launch: Launcher | None = None,
    folder: Path,
    seed: int = 0,
    moves_memory: bool = False,
) -> RoutedEngine:
    """The engine, all of whose replicas are healthy. Its `aclose` ends what was started.

    version: of the weights in the model's folder. launch: default: child processes of this one.
    folder: for the servers' logs. seed: of the run; what is sampled depends on it. moves_memory:
    whether servers on a GPU shall be able to free it (`sleep`).

    Raises EngineError with the server's own last error, and ConfigError for settings that a server
    can not have.
    """
    device = device_of(config)
    key = key_for(config)
    served = served_model(
        config, model, tokenizer, policy, device=device, moves_memory=moves_memory
    )
    client = client_with(key)

    def command(index: int, version: int) -> ServerCommand:
        return vllm_command(config, model, served, replica=index, device=device, seed=seed, key=key)

    return await open_servers(
        config,
        kind="vLLM",
        policy=policy,
        version=version,
        device=device,
        client=client,
        command=command,
        replica=lambda url, i, ours: VLLMReplica(url, client, served, index=i, is_ours=ours),
        launch=launch,
        folder=folder,
    )
