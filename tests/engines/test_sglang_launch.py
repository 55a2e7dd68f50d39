from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.engines.arguments import check_sglang
from paceline.engines.base import SGLangEngineConfig
from paceline.engines.sglang_launch import sglang_command
from paceline.engines.sglang_router import sglang_router_command
from paceline.errors import ConfigError
from paceline.models import ModelConfig


def command(model: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    options: dict[str, Any] = {
        "policy": "solver", "replica": 1, "version": 3, "device": "cpu", "seed": 0,
        "moves_memory": False,
    }  # fmt: skip
    options |= {k: changes.pop(k) for k in list(changes) if k in options or k == "api_key"}
    settings = ModelConfig(**({"path": "org/model"} | (model or {})))
    return list(sglang_command(SGLangEngineConfig(**changes), settings, **options).argv)


def value(argv: list[str], flag: str) -> str:
    assert argv.count(flag) == 1, flag
    return argv[argv.index(flag) + 1]


def test_a_server_on_a_cpu() -> None:
    argv = command()
    assert argv[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert value(argv, "--model-path") == "org/model"
    assert (value(argv, "--host"), value(argv, "--port")) == ("{host}", "{port}")
    assert value(argv, "--dtype") == "float32"
    assert value(argv, "--max-total-tokens") == "65536"
    assert value(argv, "--attention-backend") == "torch_native"
    assert value(argv, "--weight-version") == "3"
    assert "--sleep-on-idle" in argv
    for absent in ("--mem-fraction-static", "--enable-memory-saver", "--api-key"):
        assert absent not in argv


def test_a_server_on_gpus() -> None:
    argv = command(
        {"dtype": "bfloat16"}, device="cuda", moves_memory=True, tensor_parallel=2,
        memory_share=0.5, kv_cache_tokens=1000, max_context=2048, max_running=32,
        extra_arguments=("--attention-backend=fa3", "--quantization", "fp8"),
    )  # fmt: skip
    assert value(argv, "--tp-size") == "2"
    assert value(argv, "--mem-fraction-static") == "0.5"
    assert value(argv, "--max-total-tokens") == "1000"
    assert value(argv, "--context-length") == "2048"
    assert value(argv, "--max-running-requests") == "32"
    assert "--enable-memory-saver" in argv
    assert argv[-3:] == ["--attention-backend=fa3", "--quantization", "fp8"]
    assert not [a for a in argv[:-3] if a.startswith("--attention-backend")]
    built = sglang_command(
        SGLangEngineConfig(tensor_parallel=2, host="0.0.0.0"), ModelConfig(path="m"),
        policy="p", replica=3, version=0, device="cuda", seed=0, moves_memory=False,
    )  # fmt: skip
    assert (built.num_devices, built.replica, built.host) == (2, 3, "0.0.0.0")


def test_what_a_model_may_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    argv = command({"path": "model", "tokenizer": "org/tokens", "trust_remote_code": True,
                    "random_init": True}, api_key="secret")  # fmt: skip
    assert value(argv, "--model-path") == str(tmp_path / "model")
    assert value(argv, "--tokenizer-path") == "org/tokens"
    assert value(argv, "--load-format") == "dummy"
    assert value(argv, "--api-key") == "secret"
    assert "--trust-remote-code" in argv


def test_servers_of_one_engine_draw_different_numbers() -> None:
    seeds = [value(command(replica=r, seed=s), "--random-seed") for r in (0, 1) for s in (0, 1)]
    assert len(set(seeds)) == 4
    assert seeds[0] == value(command(replica=0, seed=0), "--random-seed")


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        (("--port", "80"), "chosen"),
        (("--tp", "2"), "engine.tensor_parallel"),
        (("--tp-size=2",), "engine.tensor_parallel"),
        (("--mem-fraction", "0.9"), "engine.memory_share"),
        (("--quantization", "fp8", "--dtype", "half"), "engine.dtype"),
        (("--dp-size", "2"), "engine.replicas"),
        (("--pp-size", "2"), "pipeline"),
    ],
)
def test_arguments_that_are_set_elsewhere_are_refused(extra: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        check_sglang(extra)


@pytest.mark.parametrize(
    "extra",
    [
        ("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
        ("--quantization", "fp8"),
        ("--enable-dp-attention", "--dp-size", "2"),
        ("--chunked-prefill-size", "-1"),
        ("--enable-deterministic-inference",),
    ],
)
def test_arguments_that_pass(extra: tuple[str, ...]) -> None:
    check_sglang(extra)
    assert command(extra_arguments=extra)[-len(extra) :] == list(extra)


def test_log_probs_before_temperature_are_refused() -> None:
    with pytest.raises(ConfigError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
        command(env={"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"})


def test_the_command_of_a_router() -> None:
    own = ("--policy", "power_of_two", "--log-level=info")
    config = SGLangEngineConfig(
        python="/p", request_timeout_s=9.5, env={"A": "1"}, router_arguments=own, host="0.0.0.0"
    )
    built = sglang_router_command(config, policy="solver", api_key="secret")
    argv = list(built.argv)
    assert argv[:3] == ["/p", "-m", "sglang_router.launch_router"]
    assert (value(argv, "--host"), value(argv, "--port")) == ("{host}", "{port}")
    # It would be open to the network otherwise, at a port that every router takes.
    assert value(argv, "--prometheus-host") == "127.0.0.1"
    assert value(argv, "--prometheus-port") == "{second_port}"
    assert float(value(argv, "--request-timeout-secs")) > 9.5
    assert value(argv, "--api-key") == "secret"
    for flag in ("--disable-retries", "--disable-circuit-breaker", "--disable-health-check"):
        assert flag in argv
    assert argv[-3:] == list(own)
    assert "--log-level" not in argv
    assert (built.name, built.host, built.num_devices) == ("solver-sglang-router", "0.0.0.0", 0)
    assert built.env["A"] == "1"
    assert "secret" not in sglang_router_command(config, policy="solver").argv


def test_a_router_before_servers_of_others_listens_on_loopback() -> None:
    config = SGLangEngineConfig(urls=("http://a:1",), host="0.0.0.0")
    assert sglang_router_command(config, policy="p").host == "127.0.0.1"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--host", "0.0.0.0"),
        ("--worker-urls", "http://a:1"),
        ("--prometheus-host=0.0.0.0",),
        ("--prometheus_port", "1"),
        ("--request-timeout", "3"),
        ("--retry-max-retries", "3"),
        ("--pd-disaggregation",),
        ("--service-discovery",),
    ],
)
def test_arguments_of_a_router_that_are_not_the_users(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"engine.router_arguments: take --"):
        sglang_router_command(SGLangEngineConfig(router_arguments=arguments), policy="p")
