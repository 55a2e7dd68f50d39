"""Models that are not trained: evals of a checkpoint, answers to a few prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.build.engines import open_engine, transport_of
from paceline.build.joint_serving import evaluate_joint
from paceline.build.loop import run_to_end
from paceline.build.parts import (
    Given,
    Rows,
    Text,
    load_eval_sets,
    make_model,
    make_reward,
    make_text,
)
from paceline.build.results import EvalReport
from paceline.build.site import open_site
from paceline.checkpoint import Checkpoint
from paceline.config import POLICY, RunFile
from paceline.drivers.dispose import Disposer
from paceline.engines.base import EmbeddedEngineConfig, Request, Sampling
from paceline.engines.embedded import EmbeddedEngine
from paceline.errors import ConfigError
from paceline.evals import run_evals
from paceline.models import ModelConfig, eos_token_ids, load_model, load_tokenizer
from paceline.rollout.renderer import Renderer
from paceline.trainers.devices import resolve_device
from paceline.trainers.threads import choose_threads
from paceline.types import Message, Prompt, derive_seed


def evaluate(
    run_file: RunFile,
    *,
    weights: Path | None = None,
    checkpoint: Checkpoint | None = None,
    reward: Callable[..., Any] | None = None,
    eval_prompts: Rows | None = None,
) -> EvalReport:
    """Measure the eval sets of the file on `[model]`, or on the model folder `weights`.

    With several policies: on the models that the file names, or on those of the `checkpoint`.
    """
    given = Given(None, reward, eval_prompts)
    if run_file.policies or run_file.roles:
        return run_to_end(lambda: evaluate_joint(run_file, checkpoint, given))
    return run_to_end(lambda: _evaluate(run_file, weights, given))


async def _evaluate(run_file: RunFile, weights: Path | None, given: Given) -> EvalReport:
    torch.set_num_threads(run_file.trainer.threads or choose_threads())
    async with Disposer() as disposer:
        own_reward = await make_reward(run_file, given, disposer)
        is_embedded = isinstance(run_file.engine, EmbeddedEngineConfig)
        model = make_model(run_file, weights)
        if is_embedded:
            model = model.to(resolve_device(run_file.trainer.device))
        text = make_text(run_file, model)
        sets = await load_eval_sets(run_file, given, text, disposer, own_reward)
        if not sets:
            raise ConfigError("there is nothing to measure: add an [[evals.sets]] block")
        engine = await open_engine(
            run_file,
            model,
            text,
            await open_site(run_file, disposer, learns=False),
            policy=POLICY,
            transport="shared" if is_embedded else transport_of(run_file),
            weights=weights,
            is_published_to=False,
        )
        results = await run_evals(
            [one.prepare(run_file, engine, text, POLICY) for one in sets],
            policy=POLICY,
            step=0,
            version=0,
            timeout_s=run_file.evals.timeout_s,
        )
    return EvalReport.of(str(weights or run_file.model.path), results)


def generate(
    model: ModelConfig,
    engine: EmbeddedEngineConfig,
    prompts: Sequence[str | Sequence[Message]],
    sampling: Sampling,
    *,
    seed: int = 0,
) -> list[str]:
    """One answer to each prompt: a plain text, or chat messages."""
    return run_to_end(lambda: _generate(model, engine, prompts, sampling, seed))


async def _generate(
    config: ModelConfig,
    engine_config: EmbeddedEngineConfig,
    prompts: Sequence[str | Sequence[Message]],
    sampling: Sampling,
    seed: int,
) -> list[str]:
    torch.set_num_threads(choose_threads())
    model = load_model(config, seed=seed).to(resolve_device("auto"))
    tokenizer = load_tokenizer(config)
    end_ids = eos_token_ids(model, tokenizer)
    text = Text(tokenizer, Renderer(tokenizer, end_ids=end_ids), end_ids)
    async with Disposer() as disposer:
        engine = EmbeddedEngine(
            engine_config.model_copy(update={"weights": "shared"}),
            model,
            tokenizer,
            policy=POLICY,
            eos_token_ids=end_ids,
        )
        disposer.add("engine", engine.aclose)
        requests = [
            Request(_encode(text.renderer, prompt), sampling, derive_seed(seed, "generate", i))
            for i, prompt in enumerate(prompts)
        ]
        # ends: the engine answers every request, or fails them all
        answers = await asyncio.gather(*(engine.generate(request) for request in requests))
    return [_visible(text.renderer.decode(answer.tokens), answer.stop) for answer in answers]


def _encode(renderer: Renderer, prompt: str | Sequence[Message]) -> list[int]:
    if isinstance(prompt, str):
        return renderer.encode(Prompt("prompt", text=prompt))
    return renderer.encode(Prompt("prompt", messages=tuple(prompt)))


def _visible(text: str, stop: str | int | None) -> str:
    """Without the stop text, which ends the answer."""
    return text[: text.rindex(stop)] if isinstance(stop, str) and stop in text else text
