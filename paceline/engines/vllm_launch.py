"""The command line of a vLLM server."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.engines.arguments import check_vllm, flags_of
from paceline.engines.base import VLLMEngineConfig
from paceline.engines.served import Served, resolved
from paceline.engines.server import HOST, PORT, ServerCommand
from paceline.errors import ConfigError
from paceline.models import ModelConfig
from paceline.network import is_loopback
from paceline.types import derive_seed

EXTENSION, KEY_REQUIRED = "paceline_vllm.PacelineWeights", "paceline_vllm.KeyRequired"
KEY = "PACELINE_SERVER_KEY"
"""Environment variable with the key that a server asks for."""
SERVER_FOLDER = Path(__file__).with_name("vllm_server")
LOGPROBS = "processed_logprobs"
"""Of the distribution that was sampled from, not of the model's at temperature 1."""
CPU_CACHE_TOKENS = 65_536
"""Without a limit a server on a CPU takes most of the machine's memory for its KV cache."""
CPU_CACHE_GIB = 4
"""Where a token's share is not known."""


def vllm_command(
    config: VLLMEngineConfig,
    model: ModelConfig,
    served: Served,
    *,
    replica: int,
    device: str,
    seed: int,
    key: str | None = None,
) -> ServerCommand:
    """device: `cpu` or `cuda`. key: that the server shall ask for. Raises ConfigError for arguments
    that are not the user's to set."""
    check_vllm(config.extra_arguments)
    flags = flags_of(config.extra_arguments)
    dtype = model.dtype if config.dtype == "model" else config.dtype
    argv = [config.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", resolved(model.path), "--host", HOST, "--port", PORT, "--dtype", dtype]
    argv += ["--tensor-parallel-size", str(config.tensor_parallel)]
    argv += ["--max-num-seqs", str(config.max_running)]
    # The servers of an engine must not draw the same numbers.
    argv += ["--seed", str(derive_seed(seed, served.policy, "server", replica) % 2**31)]
    argv += ["--logprobs-mode", LOGPROBS, "--generation-config", "vllm"]
    argv += ["--enable-scale-out", "--worker-extension-cls", EXTENSION]
    if model.tokenizer is not None:
        argv += ["--tokenizer", resolved(model.tokenizer)]
    if model.trust_remote_code:
        argv += ["--trust-remote-code"]
    if model.random_init:
        argv += ["--load-format", "dummy"]
    if config.max_context is not None:
        argv += ["--max-model-len", str(config.max_context)]
    argv += _memory(config, served, device)
    if key is not None:
        argv += ["--middleware", KEY_REQUIRED]
    argv += _defaults(device, flags)
    return ServerCommand(
        name=f"{served.policy}-vllm-{replica}",
        argv=(*argv, *config.extra_arguments),
        replica=replica,
        num_devices=config.tensor_parallel if device == "cuda" else 0,
        env=server_env(device, config, served, key),
        host=config.host,
    )


def _memory(config: VLLMEngineConfig, served: Served, device: str) -> list[str]:
    argv = []
    if device == "cuda":
        argv += ["--gpu-memory-utilization", str(config.memory_share)]
    if served.moves_memory:
        argv += ["--enable-sleep-mode"]
    tokens = config.kv_cache_tokens
    if tokens is None and device == "cpu":
        tokens = max(CPU_CACHE_TOKENS, served.max_context)
    if tokens is not None and served.cache_bytes is not None:
        size = tokens * served.cache_bytes // config.tensor_parallel
        argv += ["--kv-cache-memory-bytes", str(size)]
    return argv


def _defaults(device: str, flags: Sequence[str]) -> list[str]:
    """What may be given in another way in `engine.extra_arguments`."""
    argv = []
    if "--uvicorn-log-level" not in flags:
        argv += ["--uvicorn-log-level", "warning"]
    if "--no-enable-prompt-tokens-details" not in flags:
        argv += ["--enable-prompt-tokens-details"]
    if device == "cpu" and "--no-enforce-eager" not in flags:
        argv += ["--enforce-eager"]
    return argv


def server_env(
    device: str, config: VLLMEngineConfig, served: Served, key: str | None
) -> dict[str, str]:
    extra: Mapping[str, str] = config.env
    if extra.get("VLLM_SERVER_DEV_MODE", "1") != "1":
        raise ConfigError(
            "engine.env: without VLLM_SERVER_DEV_MODE=1 a server takes no pause and no new "
            "weights: leave it out"
        )
    path = [str(SERVER_FOLDER), *filter(None, [extra.get("PYTHONPATH")])]
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if is_loopback(config.host):
        env["VLLM_HOST_IP"] = "127.0.0.1"
    if key is not None:
        env[KEY] = key
    if device == "cpu":
        # It would put the threads of every server on the same cores.
        env |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if served.cache_bytes is None:
            env["VLLM_CPU_KVCACHE_SPACE"] = str(CPU_CACHE_GIB)
    return {**env, **extra, "PYTHONPATH": ":".join(path)}
