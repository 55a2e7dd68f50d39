"""Making an engine of SGLang servers: started here, or attached to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.engines.base import SGLangEngineConfig
from paceline.engines.router import RoutedEngine
from paceline.engines.served import device_of, served_model
from paceline.engines.server import Launcher, LocalLauncher, ServerCommand
from paceline.engines.sglang import SGLangReplica
from paceline.engines.sglang_launch import sglang_command
from paceline.engines.sglang_router import SGLangRouter
from paceline.engines.suppliers import client_with, key_for, open_servers
from paceline.models import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


async def open_sglang(
    config: SGLangEngineConfig,
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
    router = None
    if config.router == "sglang":
        router = SGLangRouter(
            config,
            client,
            served,
            launch=launch or LocalLauncher(folder),
            folder=folder,
            api_key=key,
        )

    def command(index: int, version: int) -> ServerCommand:
        return sglang_command(
            config,
            model,
            policy=policy,
            replica=index,
            version=version,
            device=device,
            seed=seed,
            moves_memory=served.moves_memory,
            api_key=key,
        )

    def replica(url: str, index: int, is_ours: bool) -> SGLangReplica:
        shared = None if router is None else router.open
        return SGLangReplica(url, client, served, index=index, is_ours=is_ours, open=shared)

    return await open_servers(
        config,
        kind="SGLang",
        policy=policy,
        version=version,
        device=device,
        client=client,
        command=command,
        replica=replica,
        launch=launch,
        folder=folder,
        front=router,
    )
