"""Making the parts that a run file names: one `match` a seam, heavy libraries on demand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import RunFile, locate_model
from paceline.data.loader import load_data, load_source
from paceline.data.prompts import Fit, PromptSet, prompts_from_rows
from paceline.data.sources import DataConfig, FileSource
from paceline.drivers.dispose import Disposer
from paceline.engines.base import Engine
from paceline.errors import ConfigError
from paceline.evals import PreparedSet
from paceline.evals_settings import EvalSet
from paceline.models import ModelConfig, blank_model, eos_token_ids, load_model, load_tokenizer
from paceline.rollout.renderer import Renderer
from paceline.rollout.rewards import Reward, build_reward
from paceline.rollout.runner import Runner
from paceline.rollout.single_turn import SINGLE_TURN, load_env
from paceline.trainers.base import SingleTrainerConfig
from paceline.trainers.fsdp_weights import NamedCritic
from paceline.trainers.values import ValueModel, load_value_model
from paceline.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Rows = Iterable[str | Mapping[str, Any] | Prompt]
GIVEN_EVAL_SET = "eval"
"""Name of the eval set that is handed over in Python."""


@dataclass(frozen=True, slots=True)
class Given:
    """What Python code hands over besides the run file."""

    prompts: Rows | None = None
    reward: Callable[..., Any] | None = None
    eval_prompts: Rows | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """The tokenizer of a policy, and what is made with it."""

    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    end_ids: frozenset[int]
    context: int | None = None
    """Most tokens of prompt plus answer that model and engine take; None: no limit is known."""

    def fit(self, *, keeps_all: bool = False) -> Fit:
        """Looks at the tokens of prompts while they are loaded; see `Fit`."""
        return Fit(
            lambda prompt: len(self.renderer.encode(prompt)),
            self.context,
            keeps_all,
            lambda prompt, completion: len(self.renderer.encode_completion(prompt, completion)),
        )


def model_settings(run_file: RunFile, path: Path | None = None) -> ModelConfig:
    """`[model]` with absolute paths, or with its weights from the folder `path`."""
    config = run_file.located_model
    if path is not None:
        own = {"path": str(path), "random_init": False, "adapter": None}
        config = config.model_copy(update=own)
    return config


def make_model(run_file: RunFile, path: Path | None = None) -> PreTrainedModel:
    """The model of `[model]`, or its weights from the folder `path`.

    Without weights, on the meta device, where only other processes need them.
    """
    config = model_settings(run_file, path)
    if not run_file.is_held_here:
        return blank_model(config)
    return load_model(config, seed=run_file.run.seed)


def make_critic_model(run_file: RunFile, text: Text) -> ValueModel | None:
    """The critic's model before training, if the algorithm has a critic."""
    if run_file.algorithm.critic is None:
        return None
    config = locate_model(run_file.critic_model, run_file.base)
    key = "model" if run_file.critic_settings.model is None else "critic.model"
    if isinstance(run_file.trainer, SingleTrainerConfig):
        model = load_value_model(config, seed=run_file.run.seed, key=key)
    else:
        model = NamedCritic(config, run_file.run.seed, key).blank()
    rows, tokens = model.body.get_input_embeddings().num_embeddings, len(text.tokenizer)
    if rows < tokens:
        raise ConfigError(
            f"{key}.path = {config.path!r}: it knows {rows} tokens, the policy's tokenizer has "
            f"{tokens}; a critic must share the policy's vocabulary"
        )
    return model


def make_text(run_file: RunFile, model: PreTrainedModel) -> Text:
    """Tokenizer, renderer and end tokens."""
    tokenizer = load_tokenizer(run_file.located_model)
    end_ids = eos_token_ids(model, tokenizer)
    options = run_file.rollout.chat_template_options
    renderer = Renderer(tokenizer, end_ids=end_ids, template_options=options)
    sampling = run_file.rollout.sampling
    if not (end_ids or sampling.stop or sampling.stop_token_ids):
        logger.warning(
            "neither the model nor the tokenizer has an end token: answers only end at "
            "rollout.sampling.max_tokens; set rollout.sampling.stop or stop_token_ids"
        )
    return Text(tokenizer, renderer, end_ids, _context(run_file, model))


def _context(run_file: RunFile, model: PreTrainedModel) -> int | None:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    known = [n for n in (run_file.engine.max_context, positions) if n is not None]
    return min(known, default=None)


def load_prompts(run_file: RunFile, given: Given, text: Text) -> tuple[PromptSet, ...]:
    """The training prompts, looked at and filtered by their length with the template."""
    supervised = not run_file.algorithm.learns_from_rollouts
    rules = run_file.data or DataConfig()
    fit = text.fit()
    if given.prompts is None:
        sets = load_data(rules, base=run_file.base, fit=fit, supervised=supervised)
    else:
        sets = (prompts_from_rows(given.prompts, fit=fit, rules=rules, supervised=supervised),)
    for prompts in sets:
        _tell_left_out(f"data source {prompts.name}", prompts)
    return sets


async def make_reward(
    run_file: RunFile, given: Given, disposer: Disposer, eval_set: EvalSet | None = None
) -> Reward | None:
    """The reward of the run, or of an eval set that has its own; started, and owned."""
    config = run_file.reward
    function = given.reward
    if eval_set is not None and eval_set.reward is not None:
        config, function = eval_set.reward, None
    if not config.scorers and function is None:
        return None
    reward = build_reward(config, base=run_file.base, function=function)
    disposer.add("reward workers", reward.aclose)
    await reward.start()
    return reward


def make_runner(
    run_file: RunFile,
    engine: Engine,
    text: Text,
    reward: Reward | None,
    *,
    policy: str,
    eval_set: EvalSet | None = None,
) -> Runner:
    needs_reward = eval_set is not None or run_file.algorithm.needs_reward
    name = env_name(run_file, eval_set)
    env = load_env(name, base=run_file.base, reward=reward, needs_reward=needs_reward)
    return Runner.single(
        engine,
        text.renderer,
        env,
        reward,
        run_file.rollout,
        policy=policy,
        run_seed=run_file.run.seed,
        samples_per_prompt=eval_set.samples_per_prompt if eval_set else None,
        sampling=eval_set.sampling if eval_set else None,
        purpose=f"eval:{eval_set.name}" if eval_set else "sample",
    )


def env_name(run_file: RunFile, eval_set: EvalSet | None = None) -> str:
    """The environment of the run, or of an eval set that has its own."""
    own = None if eval_set is None else eval_set.env
    return run_file.rollout.env if own is None else own


@dataclass(frozen=True, slots=True)
class LoadedEvalSet:
    """An eval set with its prompts and its reward; an engine makes it a `PreparedSet`."""

    settings: EvalSet
    prompts: tuple[Prompt, ...]
    reward: Reward | None

    def prepare(self, run_file: RunFile, engine: Engine, text: Text, policy: str) -> PreparedSet:
        runner = make_runner(
            run_file, engine, text, self.reward, policy=policy, eval_set=self.settings
        )
        on_failure = "drop_sample" if self.reward is None else self.reward.on_failure
        return PreparedSet(self.settings, self.prompts, runner, on_failure)


async def load_eval_sets(
    run_file: RunFile,
    given: Given,
    text: Text,
    disposer: Disposer,
    reward: Reward | None,
) -> list[LoadedEvalSet]:
    """All eval sets; those without a reward of their own share the run's."""
    rules = run_file.data or DataConfig()
    fit = text.fit(keeps_all=True)
    loaded = []
    for settings in run_file.evals.sets:
        prompts = load_source(settings.data, base=run_file.base, rules=rules, fit=fit)
        _tell_left_out(f"eval set {settings.name}", prompts)
        own = reward
        if settings.reward is not None:
            own = await make_reward(run_file, given, disposer, settings)
        loaded.append(LoadedEvalSet(settings, prompts.prompts, own))
    if given.eval_prompts is not None:
        given_set = EvalSet(name=GIVEN_EVAL_SET, data=FileSource(path="(given in Python)"))
        prompts = prompts_from_rows(given.eval_prompts, GIVEN_EVAL_SET, rules=rules, fit=fit)
        _tell_left_out(f"eval set {GIVEN_EVAL_SET}", prompts)
        loaded.append(LoadedEvalSet(given_set, prompts.prompts, reward))
    for one in loaded:
        if one.reward is None and env_name(run_file, one.settings) == SINGLE_TURN:
            raise ConfigError(
                f"eval set {one.settings.name!r} has no reward: set [reward], or evals.sets.reward"
            )
    return loaded


def _tell_left_out(what: str, prompts: PromptSet) -> None:
    if prompts.bad_rows:
        listed = "; ".join(map(str, prompts.bad_rows[:10]))
        logger.warning("%s: %d bad rows skipped: %s", what, len(prompts.bad_rows), listed)
    if prompts.num_filtered:
        logger.warning("%s: %d prompts left out by their length", what, prompts.num_filtered)
