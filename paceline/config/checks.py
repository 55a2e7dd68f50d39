"""Checks across blocks. Each is a small function; all that can run do run, and report together."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from paceline.config.blocks import RunFile
from paceline.config.problems import KeyPath, Problem

Purpose = Literal["train", "eval", "reward", "generate"]
"""`reward` only scores given answers, `generate` only samples."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What the run file is loaded for, and what Python code hands over besides it."""

    purpose: Purpose = "train"
    given: frozenset[str] = frozenset()
    """Among `prompts`, `reward`, `eval_prompts`."""


Find = Callable[[RunFile, Situation], Iterator[Problem]]


@dataclass(frozen=True, slots=True)
class Check:
    """A check, and the keys that it reads: it runs when all of them are right."""

    keys: tuple[KeyPath, ...]
    find: Find

    def is_able(self, wrong: Iterable[KeyPath]) -> bool:
        return not any(_meet(key, path) for key in self.keys for path in wrong)


GIVEN_EVAL_SET = "eval"
"""Name of the eval set made of the prompts that Python code hands over."""


def reads(*keys: str) -> Callable[[Find], Check]:
    """Make a check of a function that reads these keys or blocks and no others."""
    return lambda find: Check(tuple(tuple(key.split(".")) for key in keys), find)


def run_checks(
    checks: Iterable[Check],
    run_file: RunFile,
    wrong: Collection[KeyPath],
    situation: Situation,
) -> list[Problem]:
    """What those checks find that read none of the wrong keys."""
    able = [item for item in checks if item.is_able(wrong)]
    return [problem for item in able for problem in item.find(run_file, situation)]


def _meet(one: KeyPath, other: KeyPath) -> bool:
    """True if one of the two is the other or holds it."""
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def _takes_steps(run_file: RunFile, situation: Situation) -> bool:
    """True unless the run only measures."""
    return situation.purpose == "train" and run_file.run.num_steps != 0


@reads("run.num_steps", "run.num_epochs")
def steps_or_epochs(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    run = run_file.run
    if run.num_steps is not None and run.num_epochs is not None:
        yield Problem(("run", "num_epochs"), "run.num_steps is set too: keep one of them")
    if situation.purpose == "train" and run.num_steps is None and run.num_epochs is None:
        text = "missing; write how many steps to train (or run.num_epochs; 0 only runs the evals)"
        yield Problem(("run", "num_steps"), text)


@reads("run.num_steps", "evals.sets", "evals.every")
def evals_to_run(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    if run_file.evals.sets or "eval_prompts" in situation.given:
        return
    if situation.purpose == "eval":
        yield Problem(("evals", "sets"), "missing; there is nothing to measure: add [[evals.sets]]")
    elif situation.purpose == "train" and run_file.run.num_steps == 0:
        yield Problem(
            ("run", "num_steps"),
            "0 only runs the evals, and there are none: add [[evals.sets]], or train some steps",
        )
    elif situation.purpose == "train" and run_file.evals.every is not None:
        text = f"{run_file.evals.every} has nothing to measure: add an [[evals.sets]] block"
        yield Problem(("evals", "every"), text)


@reads("data")
def prompts_to_train_on(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    sources = run_file.data.all_sources if run_file.data else ()
    if "prompts" in situation.given and sources:
        yield Problem(("data",), "prompts are given in Python too: keep one of them")
    elif situation.purpose == "train" and not sources and "prompts" not in situation.given:
        path: KeyPath = ("data",) if run_file.data is None else ("data", "path")
        yield Problem(path, 'missing; name the prompts, such as [data] path = "prompts.jsonl"')


@reads(
    "reward",
    "rollout.env",
    "rollout.dynamic_sampling",
    "rollout.overlong_penalty",
    "algorithm",
    "evals.sets",
)
def reward_to_score_with(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    is_given = run_file.reward.scorers or "reward" in situation.given
    if is_given or situation.purpose == "generate":
        return
    advice = (
        'name a reward, such as [reward] kind = "exact" or function = "rewards.py:score"; '
        "see `paceline explain reward`"
    )
    has_own_env = run_file.rollout.env != "single_turn"
    if situation.purpose == "reward":
        yield Problem(("reward",), f"missing; {advice}")
    elif has_own_env:
        return
    elif situation.purpose == "train" and (reader := _reader_of_rewards(run_file)):
        yield Problem(("reward",), f"missing: {reader}; {advice}")
    else:
        for index, eval_set in enumerate(run_file.evals.sets):
            if eval_set.reward is None or not eval_set.reward.scorers:
                yield Problem(("evals", "sets", index, "reward"), f"missing; {advice}")


def _reader_of_rewards(run_file: RunFile) -> str | None:
    """What makes something of the rewards of training."""
    rollout = run_file.rollout
    if run_file.algorithm.needs_reward:
        return "the algorithm learns from rewards"
    if not run_file.algorithm.learns_from_rollouts:
        return None
    if rollout.dynamic_sampling:
        return "rollout.dynamic_sampling drops answers with equal rewards"
    if rollout.overlong_penalty:
        return "rollout.overlong_penalty is taken off the reward"
    return None


@reads("algorithm", "rollout.samples_per_prompt")
def group_has_siblings(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    size, least = run_file.rollout.samples_per_prompt, run_file.algorithm.min_group_size
    if situation.purpose == "train" and size < least:
        kind = getattr(run_file.algorithm, "kind", "this algorithm")
        yield Problem(
            ("rollout", "samples_per_prompt"),
            f"found {size}, but {kind} compares the answers to one prompt with each other: "
            f"write {least} or more (usual: 8)",
        )


@reads("rollout.prompts_per_step", "trainer.updates_per_step")
def groups_for_every_update(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    prompts, updates = run_file.rollout.prompts_per_step, run_file.trainer.updates_per_step
    if updates > prompts:
        yield Problem(
            ("trainer", "updates_per_step"),
            f"found {updates}, but a step has {prompts} prompts (rollout.prompts_per_step), and "
            f"their groups are not split: write {prompts} or less, or take more prompts",
        )


@reads("algorithm", "teacher")
def teacher_to_learn_from(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    if situation.purpose != "train":
        return
    kind = getattr(run_file.algorithm, "kind", "this algorithm")
    needs = run_file.algorithm.needs_teacher
    if needs and run_file.teacher is None:
        yield Problem(
            ("teacher",),
            f"missing: {kind} learns from a teacher; name a model to load, such as [teacher] "
            'model.path = "org/larger-model", or a server, such as url = "http://127.0.0.1:30000"',
        )
    elif run_file.teacher is not None and not needs:
        yield Problem(
            ("teacher",),
            f'{kind} has no teacher: take the block out, or write algorithm.kind = "distill"',
        )


@reads("teacher", "rollout.sampling")
def teacher_scores_at_the_temperature(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    if run_file.teacher is None or run_file.teacher.url is None or situation.purpose != "train":
        return
    temperature = run_file.rollout.sampling.temperature
    if temperature != 1:
        yield Problem(
            ("rollout", "sampling", "temperature"),
            f"found {temperature:g}, but a served teacher (teacher.url) scores given answers at "
            "temperature 1 only, and student and teacher are compared at one temperature: write 1, "
            "or load the teacher (teacher.model.path)",
        )


@reads("algorithm", "critic", "run.num_steps")
def critic_to_learn(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    critic, steps = run_file.critic, run_file.run.num_steps
    if critic is None or situation.purpose != "train":
        return
    if run_file.algorithm.critic is None:
        kind = getattr(run_file.algorithm, "kind", "this algorithm")
        yield Problem(
            ("critic",),
            f'{kind} has no critic: take the block out, or write algorithm.kind = "ppo"',
        )
    elif steps and critic.warmup_steps > steps:
        yield Problem(
            ("critic", "warmup_steps"),
            f"found {critic.warmup_steps}, but the run ends after {steps} steps (run.num_steps): "
            "the policy would never learn",
        )


@reads("algorithm", "data")
def completions_to_learn(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    if run_file.algorithm.learns_from_rollouts or run_file.data is None:
        return
    for index, source in enumerate(run_file.data.all_sources):
        if source.kind == "reasoning_gym":
            yield Problem(
                ("data", "sources", index, "kind"),
                "reasoning_gym makes prompts and answers, but supervised training learns "
                "completions: write them to a file with the columns prompt and completion",
            )


@reads("rollout.sampling", "algorithm", "run.num_steps")
def answers_to_learn_from(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    learns = _takes_steps(run_file, situation) and run_file.algorithm.learns_from_rollouts
    if learns and not run_file.rollout.sampling.is_pure_temperature:
        yield Problem(
            ("rollout", "sampling"),
            "training needs temperature > 0, top_p = 1, top_k = 0, min_p = 0 and "
            "repetition_penalty = 1, since the trainer applies the temperature only; eval sets "
            "may use any (evals.sets.sampling)",
        )


@reads("model.dtype", "critic", "run.num_steps")
def dtype_that_trains(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    if not _takes_steps(run_file, situation):
        return
    for path, model in run_file.models.items():
        if model.dtype == "float16" and path[0] != "teacher":
            yield Problem(
                (*path, "dtype"),
                'float16 can not be trained (its gradients underflow): write "float32", with '
                'trainer.autocast = "bfloat16" to compute faster',
            )


@reads("engine.max_context", "rollout.sampling", "data.max_prompt_tokens", "evals.sets")
def answers_fit_the_context(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    context = run_file.engine.max_context
    if context is None:
        return
    prompt = (run_file.data.max_prompt_tokens if run_file.data else None) or 0
    answers: list[tuple[KeyPath, int]] = [
        (("rollout", "sampling", "max_tokens"), run_file.rollout.sampling.max_tokens)
    ]
    for index, eval_set in enumerate(run_file.evals.sets):
        if eval_set.sampling is not None:
            key = ("evals", "sets", index, "sampling", "max_tokens")
            answers.append((key, eval_set.sampling.max_tokens))
    for path, tokens in answers:
        if tokens + max(prompt, 1) > context:
            prompts = f"prompts of up to {prompt} tokens" if prompt else "a prompt"
            yield Problem(
                path,
                f"answers of {tokens} tokens after {prompts} do not fit into "
                f"engine.max_context = {context}: lower this, or raise that",
            )


@reads("engine.weights", "memory")
def shared_weights_stay(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    memory = run_file.memory
    moves_weights = memory.order != "none" and "weights" in memory.engine_parts
    if run_file.engine.weights == "shared" and moves_weights:
        yield Problem(
            ("memory", "engine_parts"),
            'engine.weights = "shared": the engine has no weights of its own to put away; '
            'leave "weights" out, or write engine.weights = "copy"',
        )


@reads("checkpoint.best_metric", "checkpoint.every", "evals.sets", "evals.every")
def best_metric_is_measured(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    metric = run_file.checkpoint.best_metric
    if metric is None or situation.purpose != "train":
        return
    path: KeyPath = ("checkpoint", "best_metric")
    names = {eval_set.name for eval_set in run_file.evals.sets}
    if "eval_prompts" in situation.given:
        names.add(GIVEN_EVAL_SET)
    if problem := run_file.checkpoint.best_metric_problem(names):
        yield Problem(path, problem)
    elif metric.startswith("eval/") and run_file.evals.every is None:
        yield Problem(path, f"{metric} is never measured: set evals.every")
    elif run_file.checkpoint.every == "never":
        yield Problem(path, 'checkpoint.every = "never" leaves no checkpoint to choose from')


@reads("checkpoint.best_metric", "checkpoint.every", "evals.every", "run.num_steps")
def best_has_rivals(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    """A checkpoint competes only if its very step is measured."""
    saved, measured = run_file.checkpoint.every, run_file.evals.every
    steps, metric = run_file.run.num_steps, run_file.checkpoint.best_metric
    if saved == "never" or measured is None or steps is None:
        return
    is_multiple = saved % measured == 0 or measured % saved == 0
    is_of_eval = metric is not None and metric.startswith("eval/")
    if is_of_eval and not is_multiple and math.lcm(saved, measured) >= steps:
        yield Problem(
            ("checkpoint", "best_metric"),
            f"no checkpoint before the last is measured: checkpoint.every = {saved} and "
            f"evals.every = {measured} meet at no step; make one a multiple of the other",
        )


@reads("checkpoint.best_metric", "evals.sets")
def best_pass_at_is_measured(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    metric = run_file.checkpoint.best_metric or ""
    for eval_set in run_file.evals.sets:
        k = metric.removeprefix(f"eval/{eval_set.name}/pass_at_")
        if k != metric and k.isdecimal() and int(k) not in eval_set.pass_at:
            yield Problem(
                ("checkpoint", "best_metric"),
                f"eval set {eval_set.name!r} does not measure pass_at_{k}: its pass_at is "
                f"{list(eval_set.pass_at)}",
            )


CHECKS: tuple[Check, ...] = (
    steps_or_epochs,
    evals_to_run,
    prompts_to_train_on,
    reward_to_score_with,
    group_has_siblings,
    groups_for_every_update,
    critic_to_learn,
    teacher_to_learn_from,
    teacher_scores_at_the_temperature,
    completions_to_learn,
    answers_to_learn_from,
    dtype_that_trains,
    answers_fit_the_context,
    shared_weights_stay,
    best_metric_is_measured,
    best_has_rivals,
    best_pass_at_is_measured,
)
