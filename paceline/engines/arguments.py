"""Further command-line arguments that a user gives to a server, and which of them are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.errors import ConfigError

SHORTEST_PREFIX = 6
"""`--mem-f` is understood as `--mem-fraction-static` by a server; `--tp` is a name of its own."""


SGLANG = {
    "--model-path": "model.path",
    "--model": "model.path",
    "--tokenizer-path": "model.tokenizer",
    "--trust-remote-code": "model.trust_remote_code",
    "--dtype": "engine.dtype",
    "--device": "engine.device",
    "--host": "engine.host",
    "--port": "which is chosen when the server starts",
    "--api-key": "which is made for a server that is open to the network",
    "--tp": "engine.tensor_parallel",
    "--tp-size": "engine.tensor_parallel",
    "--tensor-parallel-size": "engine.tensor_parallel",
    "--context-length": "engine.max_context",
    "--max-running-requests": "engine.max_running",
    "--max-total-tokens": "engine.kv_cache_tokens",
    "--mem-fraction-static": "engine.memory_share",
    "--random-seed": "which follows from run.seed",
    "--weight-version": "which is the policy's",
    "--enable-memory-saver": "which follows from [memory]",
    "--pp-size": "engine.tensor_parallel: weights are not sent to pipeline stages",
    "--pipeline-parallel-size": "engine.tensor_parallel: weights are not sent to pipeline stages",
    "--skip-tokenizer-init": "which would leave stop texts without effect",
    "--base-gpu-id": "the launcher: a server sees no devices but its own",
    "--nnodes": "engine.tensor_parallel: a replica stands on one machine",
}
DATA_PARALLEL = ("--dp", "--dp-size", "--data-parallel-size")

WHOLE = "which would need other servers than whole replicas"
KNOWS = "which is the engine's to decide, who knows what weights a replica holds"
SGLANG_ROUTER = {
    "--host": "engine.host",
    "--port": "which is chosen when the router starts",
    "--prometheus-host": "which is loopback",
    "--prometheus-port": "which is chosen when the router starts",
    "--worker-urls": "engine.replicas or engine.urls",
    "--api-key": "which is that of the servers",
    "--control-plane-api-keys": "which is that of the servers",
    "--request-timeout-secs": "engine.request_timeout_s",
    "--disable-retries": "engine.retries",
    "--retry-max-retries": "engine.retries",
    "--disable-circuit-breaker": KNOWS,
    "--disable-health-check": KNOWS,
    "--health-check-interval-secs": KNOWS,
    "--health-check-timeout-secs": KNOWS,
    "--health-check-endpoint": KNOWS,
    "--service-discovery": KNOWS,
    "--pd-disaggregation": WHOLE,
    "--prefill": WHOLE,
    "--decode": WHOLE,
    "--mini-lb": WHOLE,
    "--backend": WHOLE,
    "--enable-igw": WHOLE,
    "--dp-aware": WHOLE,
}

VLLM = {
    "--model": "model.path",
    "--tokenizer": "model.tokenizer",
    "--trust-remote-code": "model.trust_remote_code",
    "--dtype": "engine.dtype",
    "--host": "engine.host",
    "--port": "which is chosen when the server starts",
    "--uds": "engine.host",
    "--api-key": "which is made for a server that is open to the network",
    "--tensor-parallel-size": "engine.tensor_parallel",
    "-tp": "engine.tensor_parallel",
    "--pipeline-parallel-size": "engine.tensor_parallel: weights are not sent to pipeline stages",
    "-pp": "engine.tensor_parallel: weights are not sent to pipeline stages",
    "--data-parallel-size": "engine.replicas",
    "-dp": "engine.replicas",
    "--api-server-count": "engine.replicas",
    "--nnodes": "engine.tensor_parallel: a replica stands on one machine",
    "--max-model-len": "engine.max_context",
    "--max-num-seqs": "engine.max_running",
    "--kv-cache-memory-bytes": "engine.kv_cache_tokens",
    "--num-gpu-blocks-override": "engine.kv_cache_tokens",
    "--gpu-memory-utilization": "engine.memory_share",
    "--seed": "which follows from run.seed",
    "--enable-sleep-mode": "which follows from [memory]",
    "--logprobs-mode": "which is that of the distribution that was sampled from",
    "--worker-extension-cls": "which takes new weights",
    "--enable-scale-out": "which takes and gives token ids",
    "--tokens-only": "which would leave stop texts without effect",
    "--skip-tokenizer-init": "which would leave stop texts without effect",
    "--generation-config": "rollout.sampling",
    "--config": "single arguments: a file would hide what is set twice",
}
"""Arguments that Paceline sets, or that must not be set, with what to set in their place; or what
they name, which is nobody's to set."""


def flags_of(extra: Sequence[str]) -> list[str]:
    """Without their values, in the spelling with dashes."""
    return [
        argument.partition("=")[0].replace("_", "-")
        for argument in extra
        if argument.startswith("-") and not _is_number(argument)
    ]


def check_sglang(extra: Sequence[str]) -> None:
    """Raise ConfigError for what is set elsewhere, or would break the coupling with the trainer."""
    flags = flags_of(extra)
    _refuse_own(flags, SGLANG)
    for flag in flags:
        if flag in DATA_PARALLEL and "--enable-dp-attention" not in flags:
            raise ConfigError(
                f"engine.extra_arguments: {flag} is for attention only (--enable-dp-attention); "
                "for more servers of a model set engine.replicas"
            )


def check_sglang_router(extra: Sequence[str]) -> None:
    """Raise ConfigError for what is set elsewhere, or would let requests go astray."""
    _refuse_own(flags_of(extra), SGLANG_ROUTER, "engine.router_arguments")


def check_vllm(extra: Sequence[str]) -> None:
    """Raise ConfigError for what is set elsewhere, or would break the coupling with the trainer."""
    _refuse_own(flags_of(extra), VLLM)


def _refuse_own(
    flags: Sequence[str], own: Mapping[str, str], key: str = "engine.extra_arguments"
) -> None:
    for flag in flags:
        name = next((name for name in own if _means(flag, name)), None)
        if name is not None:
            is_ours = own[name].startswith("which ")
            instead = f"it names something {own[name]}" if is_ours else f"set {own[name]}"
            raise ConfigError(f"{key}: take {flag} out; {instead}")


def _means(flag: str, own: str) -> bool:
    """True if the server reads the flag as `own`, or may do so."""
    return flag == own or (len(flag) > SHORTEST_PREFIX and own.startswith(flag))


def _is_number(argument: str) -> bool:
    return argument[1:2].isdigit()
