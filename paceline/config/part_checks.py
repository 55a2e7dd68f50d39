"""Checks of what runs where: engines and trainers in this process, or in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from urllib.parse import urlsplit

from paceline.config.blocks import RunFile
from paceline.config.checks import Check, Situation, reads
from paceline.config.problems import Problem
from paceline.engines.arguments import check_sglang, check_sglang_router, check_vllm
from paceline.engines.base import (
    EmbeddedEngineConfig,
    ServedEngineConfig,
    SGLangEngineConfig,
    VLLMEngineConfig,
)
from paceline.errors import ConfigError
from paceline.trainers.base import SingleTrainerConfig


@reads("trainer.kind", "engine.kind", "engine.weights")
def weights_can_travel(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    engine, trainer = run_file.engine, run_file.trainer
    if isinstance(engine, EmbeddedEngineConfig):
        if engine.weights == "shared" and not isinstance(trainer, SingleTrainerConfig):
            yield Problem(
                ("engine", "weights"),
                f'"shared": a trainer of kind "{trainer.kind}" is in processes of its own, so the '
                'engine needs a copy: write "auto" or "copy"',
            )
    elif engine.urls and engine.weights == "handles":
        yield Problem(
            ("engine", "weights"),
            '"handles" sends pickled tensors, which only servers that are started here are given: '
            'write "collective", or "disk" for a folder that both can read',
        )


@reads("engine", "weight_check", "model.dtype")
def copies_may_be_rounded(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    engine, own = run_file.engine, ("model", run_file.model.dtype)
    if not isinstance(engine, EmbeddedEngineConfig) or engine.dtype in own:
        return
    if engine.weights == "shared":
        yield Problem(
            ("engine", "dtype"),
            f'"{engine.dtype}": an engine that shares the trainer\'s weights has their type; write '
            'engine.weights = "copy", or leave it out',
        )
    check = run_file.weight_check
    if check.when != "never" and not check.tolerance:
        yield Problem(
            ("weight_check", "when"),
            f'"{check.when}" compares bit for bit, and engine.dtype = "{engine.dtype}" rounds: set '
            "weight_check.tolerance, or leave one of them out",
        )


@reads("engine")
def attached_servers_are_as_they_are(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    engine = run_file.engine
    if not isinstance(engine, ServedEngineConfig) or not engine.urls:
        return
    starts_router = isinstance(engine, SGLangEngineConfig) and engine.router == "sglang"
    given = {
        "extra_arguments": bool(engine.extra_arguments),
        "env": bool(engine.env) and not starts_router,
        "python": engine.python is not None and not starts_router,
        "replicas": engine.replicas != 1,
    }
    for key in (key for key, is_given in given.items() if is_given):
        yield Problem(
            ("engine", key), "engine.urls names servers that run already: set it there, or leave "
            "the urls out to have servers started"
        )  # fmt: skip
    for index, url in enumerate(engine.urls):
        if not _is_address(url):
            yield Problem(
                ("engine", "urls", index), f"found {url!r}, allowed: http://host:port or https://"
            )
    if len({url.rstrip("/") for url in engine.urls}) < len(engine.urls):
        yield Problem(("engine", "urls"), "the same server stands there twice")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is none
        return False


@reads("engine")
def arguments_are_the_users(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    engine = run_file.engine
    if isinstance(engine, SGLangEngineConfig):
        yield from _refused("extra_arguments", check_sglang, engine.extra_arguments)
        yield from _refused("router_arguments", check_sglang_router, engine.router_arguments)
        if engine.router_arguments and engine.router != "sglang":
            yield Problem(
                ("engine", "router_arguments"),
                f'engine.router = "{engine.router}" takes none: write engine.router = "sglang", or '
                "leave them out",
            )
    elif isinstance(engine, VLLMEngineConfig):
        yield from _refused("extra_arguments", check_vllm, engine.extra_arguments)


def _refused(
    key: str, check: Callable[[Sequence[str]], None], arguments: Sequence[str]
) -> Iterator[Problem]:
    try:
        check(arguments)
    except ConfigError as error:
        yield Problem(("engine", key), str(error).removeprefix(f"engine.{key}: "))


@reads("engine.kind", "trainer.kind", "run.deterministic", "evals.background", "cluster")
def needs_it_all_in_one_process(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    is_served = isinstance(run_file.engine, ServedEngineConfig)
    is_apart = is_served or not isinstance(run_file.trainer, SingleTrainerConfig)
    if is_served and run_file.run.deterministic:
        yield Problem(
            ("run", "deterministic"),
            f'an engine of kind "{run_file.engine.kind}" answers in an order of its own: leave it '
            'out, or write engine.kind = "embedded"',
        )
    if is_served and run_file.evals.background:
        yield Problem(
            ("evals", "background"),
            "evals beside training need a copy of the weights in this process: leave it out, or "
            'write engine.kind = "embedded"',
        )
    if run_file.cluster.runtime == "ray" and not is_apart:
        yield Problem(
            ("cluster", "runtime"),
            '"ray" has nothing to run: engine and trainer are in this process; write '
            'trainer.kind = "fsdp", or an engine of servers such as engine.kind = "sglang"',
        )


PART_CHECKS: tuple[Check, ...] = (
    weights_can_travel,
    copies_may_be_rounded,
    attached_servers_are_as_they_are,
    arguments_are_the_users,
    needs_it_all_in_one_process,
)
