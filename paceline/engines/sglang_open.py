"""Making an engine of SGLang servers: started here, or attached to."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from paceline.engines.base import SGLangEngineConfig
from paceline.engines.http import JsonClient, LostServerError
from paceline.engines.router import RoutedEngine
from paceline.engines.server import (
    Launcher,
    LocalLauncher,
    Server,
    last_words,
    wait_until_healthy,
)
from paceline.engines.sglang import Served, SGLangReplica
from paceline.engines.sglang_launch import resolved, sglang_command
from paceline.errors import ConfigError, EngineError
from paceline.models import ModelConfig, eos_token_ids
from paceline.network import is_loopback

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from paceline.engines.replica import Supplier

logger = logging.getLogger(__name__)

TRIES = 3
"""Ports that are tried: another program may take one just before the server does."""
PORT_TAKEN = ("address already in use", "port is already in use", "is not available")


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
    device = _device(config)
    api_key = None if config.urls or is_loopback(config.host) else secrets.token_urlsafe(32)
    client = JsonClient({"Authorization": f"Bearer {api_key}"} if api_key else None)
    served = _served(config, model, tokenizer, policy, device=device, moves_memory=moves_memory)
    launcher = launch or LocalLauncher(folder)
    suppliers: list[Supplier] = [
        Attached(url.rstrip("/"), client, served, index=index, version=version, config=config)
        for index, url in enumerate(config.urls)
    ]
    if not config.urls:
        suppliers += [
            Started(
                launcher, config, model, client, served,
                index=index, device=device, seed=seed, api_key=api_key, folder=folder,
            )
            for index in range(config.replicas)
        ]  # fmt: skip
    engine = RoutedEngine(
        suppliers,
        policy=policy,
        version=version,
        retries=config.retries,
        backend="nccl" if device == "cuda" else "gloo",
        return_timeout_s=config.start_timeout_s,
        close=client.aclose,
    )
    try:
        await engine.open()
    except BaseException:
        await engine.aclose()
        raise
    return engine


class Started:
    """A server that is started here. Implements `paceline.engines.replica.Supplier`."""

    is_ours = True

    def __init__(
        self,
        launcher: Launcher,
        config: SGLangEngineConfig,
        model: ModelConfig,
        client: JsonClient,
        served: Served,
        *,
        index: int,
        device: str,
        seed: int,
        api_key: str | None,
        folder: Path,
    ) -> None:
        self.name = f"SGLang server {index} of policy {served.policy!r}"
        self._launcher, self._config, self._model = launcher, config, model
        self._client, self._served, self._index = client, served, index
        self._device, self._seed, self._api_key = device, seed, api_key
        self._folder = folder
        self._server: Server | None = None

    async def start(self, version: int) -> SGLangReplica:
        for attempt in range(TRIES):
            await self.stop()
            try:
                return await self._start(version)
            except EngineError as error:
                taken = any(words in str(error).lower() for words in PORT_TAKEN)
                if not taken or attempt == TRIES - 1:
                    raise
                logger.warning("%s: its port was taken; trying another", self.name)
        raise AssertionError("not reached")

    async def _start(self, version: int) -> SGLangReplica:
        command = sglang_command(
            self._config,
            self._model,
            policy=self._served.policy,
            replica=self._index,
            version=version,
            device=self._device,
            seed=self._seed,
            moves_memory=self._served.moves_memory,
            api_key=self._api_key,
        )
        logger.info("%s: starting", self.name)
        server = self._server = await self._launcher.start(command)
        replica = SGLangReplica(
            server.url, self._client, self._served, index=self._index, is_ours=True
        )
        replica.weights.held = version
        try:
            await wait_until_healthy(
                server,
                replica.look,
                name=self.name,
                timeout_s=self._config.start_timeout_s,
                where=f"\nIts log: {self._folder / command.name}.log",
            )
        except BaseException:
            await self.stop()
            raise
        logger.info("%s: ready at %s", self.name, server.url)
        return replica

    async def problem(self) -> str | None:
        server = self._server
        if server is None:
            return f"{self.name} does not run"
        if (end := await server.ended()) is None:
            return None
        return f"{self.name} {end}: {last_words(await server.last_output())}"

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.aclose()


class Attached:
    """A server that somebody else runs. Implements `paceline.engines.replica.Supplier`."""

    is_ours = False

    def __init__(
        self,
        url: str,
        client: JsonClient,
        served: Served,
        *,
        index: int,
        version: int,
        config: SGLangEngineConfig,
    ) -> None:
        self.name = url
        self._replica = SGLangReplica(url, client, served, index=index, is_ours=False)
        self._timeout_s = config.start_timeout_s

    async def start(self, version: int) -> SGLangReplica:
        await wait_until_healthy(
            _Foreign(self.name), self._replica.look, name=self.name, timeout_s=self._timeout_s
        )
        # It is taken to hold what the engine begins with; one that its owner starts again later
        # says something else.
        try:
            await self._replica.weights.state(version)
        except LostServerError as error:
            raise EngineError(str(error)) from error
        return self._replica

    async def problem(self) -> str | None:
        return None

    async def stop(self) -> None:
        """It is not ours to end."""


class _Foreign:
    """A server of which no more is known than where it is."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def ended(self) -> str | None:
        return None

    async def last_output(self) -> str:
        return ""

    async def aclose(self) -> None: ...


def _served(
    config: SGLangEngineConfig,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    policy: str,
    *,
    device: str,
    moves_memory: bool,
) -> Served:
    """What the model's folder tells of it, without its weights."""
    from transformers import AutoConfig, GenerationConfig

    source = resolved(model.path)
    try:
        architecture = AutoConfig.from_pretrained(source, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model.path = {model.path!r} can not be served: {reason}") from error
    try:
        generation = GenerationConfig.from_pretrained(source)
    except OSError:
        generation = None
    text = architecture.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    found = SimpleNamespace(config=text, generation_config=generation)
    limits = [limit for limit in (config.max_context, longest) if limit is not None]
    if not limits:
        raise ConfigError(
            f"model.path = {model.path!r}: its configuration does not say how many tokens the "
            "model can read: set engine.max_context"
        )
    return Served(
        policy=policy,
        eos_token_ids=eos_token_ids(found, tokenizer),
        max_context=min(limits),
        vocab_size=text.vocab_size,
        tokenizer=tokenizer,
        request_timeout_s=config.request_timeout_s,
        moves_memory=moves_memory and device == "cuda",
        num_devices=config.tensor_parallel,
        compares=device == "cuda" and not model.random_init,
    )


def _device(config: SGLangEngineConfig) -> str:
    if config.device != "auto":
        return config.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
