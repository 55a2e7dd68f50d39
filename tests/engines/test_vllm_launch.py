from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.engines.base import VLLMEngineConfig
from paceline.engines.served import Served
from paceline.engines.server import ServerCommand
from paceline.engines.vllm_launch import SERVER_FOLDER, vllm_command
from paceline.errors import ConfigError
from paceline.models import ModelConfig


def built(model: dict[str, Any] | None = None, **changes: Any) -> ServerCommand:
    options: dict[str, Any] = {"replica": 1, "device": "cpu", "seed": 0, "key": None}
    options |= {name: changes.pop(name) for name in list(changes) if name in options}
    about: dict[str, Any] = {"max_context": 2048, "cache_bytes": 1000, "moves_memory": False}
    about |= {
        name: changes.pop(name) for name in ("cache_bytes", "moves_memory") if name in changes
    }
    served = Served(
        policy="solver", eos_token_ids=frozenset(), vocab_size=9, tokenizer=None,
        request_timeout_s=1.0, **about,
    )  # fmt: skip
    settings = ModelConfig(**({"path": "org/model"} | (model or {})))
    return vllm_command(VLLMEngineConfig(**changes), settings, served, **options)


def value(command: ServerCommand, flag: str) -> str:
    assert command.argv.count(flag) == 1, flag
    return command.argv[command.argv.index(flag) + 1]


def test_a_server_on_a_cpu() -> None:
    command = built()
    assert command.argv[:3] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    assert value(command, "--model") == "org/model"
    assert (value(command, "--host"), value(command, "--port")) == ("{host}", "{port}")
    assert value(command, "--dtype") == "float32"
    assert value(command, "--kv-cache-memory-bytes") == "65536000"
    assert value(command, "--logprobs-mode") == "processed_logprobs"
    assert value(command, "--worker-extension-cls") == "paceline_vllm.PacelineWeights"
    assert "--enforce-eager" in command.argv
    for absent in ("--gpu-memory-utilization", "--enable-sleep-mode", "--middleware"):
        assert absent not in command.argv
    assert (command.name, command.num_devices, command.replica) == ("solver-vllm-1", 0, 1)
    assert command.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert command.env["VLLM_NO_USAGE_STATS"] == "1"
    assert command.env["VLLM_HOST_IP"] == "127.0.0.1"
    # Only what the server shall import, and not what is installed beside Paceline.
    assert command.env["PYTHONPATH"] == str(SERVER_FOLDER)
    assert {p.name for p in SERVER_FOLDER.glob("*.py")} == {"__init__.py", "paceline_vllm.py"}


def test_a_server_on_gpus() -> None:
    command = built(
        {"dtype": "bfloat16"}, device="cuda", moves_memory=True, tensor_parallel=2,
        memory_share=0.5, kv_cache_tokens=1000, max_context=2048, max_running=32,
        extra_arguments=("--quantization", "fp8", "--block-size=32"), env={"PYTHONPATH": "/own"},
    )  # fmt: skip
    assert value(command, "--tensor-parallel-size") == "2"
    assert value(command, "--gpu-memory-utilization") == "0.5"
    assert value(command, "--kv-cache-memory-bytes") == "500000"
    assert value(command, "--max-model-len") == "2048"
    assert value(command, "--max-num-seqs") == "32"
    assert "--enable-sleep-mode" in command.argv
    assert "--enforce-eager" not in command.argv
    assert command.argv[-3:] == ("--quantization", "fp8", "--block-size=32")
    assert command.num_devices == 2
    assert command.env["PYTHONPATH"] == f"{SERVER_FOLDER}:/own"
    assert "--kv-cache-memory-bytes" not in built(device="cuda").argv


def test_a_model_of_which_the_cache_is_not_known() -> None:
    command = built(cache_bytes=None)
    assert "--kv-cache-memory-bytes" not in command.argv
    assert command.env["VLLM_CPU_KVCACHE_SPACE"] == "4"


def test_a_server_that_is_open_to_the_network() -> None:
    command = built(host="0.0.0.0", key="secret")
    assert value(command, "--middleware") == "paceline_vllm.KeyRequired"
    assert command.env["PACELINE_SERVER_KEY"] == "secret"
    assert "secret" not in " ".join(command.argv)
    assert "VLLM_HOST_IP" not in command.env


def test_what_a_model_may_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    command = built(
        {"path": "model", "tokenizer": "org/tokens", "trust_remote_code": True,
         "random_init": True}
    )  # fmt: skip
    assert value(command, "--model") == str(tmp_path / "model")
    assert value(command, "--tokenizer") == "org/tokens"
    assert value(command, "--load-format") == "dummy"
    assert "--trust-remote-code" in command.argv


def test_servers_of_one_engine_draw_different_numbers() -> None:
    seeds = [value(built(replica=r, seed=s), "--seed") for r in (0, 1) for s in (0, 1)]
    assert len(set(seeds)) == 4
    assert seeds[0] == value(built(replica=0, seed=0), "--seed")


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        (("--port", "80"), "chosen"),
        (("-tp", "2"), "engine.tensor_parallel"),
        (("--tensor_parallel_size=2",), "engine.tensor_parallel"),
        (("--gpu-memory-util", "0.9"), "engine.memory_share"),
        (("--quantization", "fp8", "--dtype", "half"), "engine.dtype"),
        (("-dp", "2"), "engine.replicas"),
        (("--logprobs-mode", "raw_logprobs"), "the distribution that was sampled from"),
        (("--config", "file.yaml"), "single arguments"),
    ],
)
def test_arguments_that_are_set_elsewhere_are_refused(extra: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        built(extra_arguments=extra)


@pytest.mark.parametrize(
    "extra",
    [
        ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'),
        ("--quantization", "fp8"),
        ("--kv-cache-dtype", "fp8"),
        ("--max-num-batched-tokens", "4096"),
        ("--no-enforce-eager",),
    ],
)
def test_arguments_that_pass(extra: tuple[str, ...]) -> None:
    command = built(extra_arguments=extra)
    assert command.argv[-len(extra) :] == extra
    assert ("--enforce-eager" in command.argv) is ("--no-enforce-eager" not in extra)


def test_a_server_that_takes_no_new_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE"):
        built(env={"VLLM_SERVER_DEV_MODE": "0"})
