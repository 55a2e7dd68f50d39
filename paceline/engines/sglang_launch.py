"""The command line of an SGLang server."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from paceline.engines.arguments import check_sglang, flags_of
from paceline.engines.base import SGLangEngineConfig
from paceline.engines.served import resolved
from paceline.engines.server import HOST, PORT, ServerCommand
from paceline.errors import ConfigError
from paceline.models import ModelConfig
from paceline.types import derive_seed

CPU_CACHE_TOKENS = 65_536
"""Without a limit a server on a CPU takes most of the machine's memory for its KV cache."""

DEFAULTS = {
    "cpu": {"--attention-backend": "torch_native", "--sampling-backend": "pytorch"},
    "cuda": {},
}
"""What may be given in another way in `engine.extra_arguments`."""
DEFAULTS_OF_ALL = {"--grammar-backend": "none", "--log-level-http": "warning"}


def sglang_command(
    config: SGLangEngineConfig,
    model: ModelConfig,
    *,
    policy: str,
    replica: int,
    version: int,
    device: str,
    seed: int,
    moves_memory: bool,
    api_key: str | None = None,
) -> ServerCommand:
    """version: of the weights in the model's folder. device: `cpu` or `cuda`. moves_memory: whether
    the server shall be able to give its memory back. Raises ConfigError for arguments that are not
    the user's to set."""
    check_sglang(config.extra_arguments)
    dtype = model.dtype if config.dtype == "model" else config.dtype
    argv = [config.python or sys.executable, "-m", "sglang.launch_server"]
    argv += ["--model-path", resolved(model.path), "--host", HOST, "--port", PORT]
    argv += ["--device", device, "--dtype", dtype, "--weight-version", str(version)]
    argv += ["--tp-size", str(config.tensor_parallel)]
    argv += ["--max-running-requests", str(config.max_running)]
    # The servers of an engine must not draw the same numbers.
    own_seed = derive_seed(seed, policy, "server", replica) % 2**31
    argv += ["--random-seed", str(own_seed), "--sleep-on-idle"]
    if model.tokenizer is not None:
        argv += ["--tokenizer-path", resolved(model.tokenizer)]
    if model.trust_remote_code:
        argv += ["--trust-remote-code"]
    if model.random_init:
        argv += ["--load-format", "dummy"]
    if config.max_context is not None:
        argv += ["--context-length", str(config.max_context)]
    if tokens := config.kv_cache_tokens or (CPU_CACHE_TOKENS if device == "cpu" else None):
        argv += ["--max-total-tokens", str(tokens)]
    if device == "cuda":
        argv += ["--mem-fraction-static", str(config.memory_share)]
    if moves_memory:
        argv += ["--enable-memory-saver"]
    if api_key is not None:
        argv += ["--api-key", api_key]
    given = set(flags_of(config.extra_arguments))
    for flag, value in {**DEFAULTS[device], **DEFAULTS_OF_ALL}.items():
        if flag not in given:
            argv += [flag, value]
    return ServerCommand(
        name=f"{policy}-sglang-{replica}",
        argv=(*argv, *config.extra_arguments),
        replica=replica,
        num_devices=config.tensor_parallel if device == "cuda" else 0,
        env=server_env(device, config.env),
        host=config.host,
    )


def server_env(device: str, extra: Mapping[str, str]) -> dict[str, str]:
    if "SGLANG_RETURN_ORIGINAL_LOGPROB" in extra:
        raise ConfigError(
            "engine.env: SGLANG_RETURN_ORIGINAL_LOGPROB would give log-probs before temperature, "
            "and training needs those of the distribution that was sampled from: leave it out"
        )
    env = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
    if device == "cpu":
        # Otherwise SGLang takes the machine for one with another accelerator.
        env["SGLANG_USE_CPU_ENGINE"] = "1"
    return {**env, **extra}
