"""Commands about run files: check, explain, reward-test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import Debug, Overrides, RunFilePath, complete_key
from paceline.config import RunFile, load_run_file, render_run_file
from paceline.engines.base import ServedEngineConfig
from paceline.explain import explain
from paceline.trainers.base import FSDPTrainerConfig

if TYPE_CHECKING:
    from paceline.rollout.reward_check import Answer, CheckedAnswer
    from paceline.rollout.role_settings import RoleConfig


def check(
    run_file: RunFilePath,
    overrides: Overrides = None,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Print the whole file with every default.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Find every error of a run file, in under a second and without loading a model.

    [bold]Examples[/bold]

    [cyan]paceline check run.toml[/cyan]

    [cyan]paceline check run.toml trainer.lr=1e-4 --resolved[/cyan]
    """
    loaded = load_run_file(run_file, overrides or ())
    typer.echo(render_run_file(loaded) if resolved else summary(loaded, run_file))


def summary(run_file: RunFile, path: Path) -> str:
    """What a run would do, in a few lines."""
    run = run_file.run
    if run.num_epochs is not None:
        length = f"{run.num_epochs} epochs"
    else:
        length = f"{run.num_steps} steps" if run.num_steps else "evals only"
    is_started = any((run_file.run_dir / "checkpoints").glob("step-*"))
    goes_on = ", which has checkpoints to go on from" if is_started else ""
    rows = [("run", f"{run.name}: {length}, files in {run_file.run_dir}{goes_on}")]
    if run_file.policies:
        rows += [(name, _policy(run_file, name)) for name in run_file.policies]
        rows += [("roles", ", ".join(_role(role, by) for role, by in run_file.cast.items()))]
    else:
        rows += [("model", _model(run_file)), ("learns", _learns(run_file))]
    sources = [source.label for source in run_file.data.all_sources] if run_file.data else []
    every = run_file.checkpoint.every
    rows += [
        ("data", ", ".join(sources) or "given in Python"),
        ("evals", ", ".join(eval_set.name for eval_set in run_file.evals.sets) or "none"),
        ("saves", f"every {every} steps" if every != "never" else "never"),
    ]
    width = max(7, *(len(name) for name, _ in rows))
    lines = [f"{path} is right."]
    return "\n".join([*lines, *(f"  {name:<{width}} {text}" for name, text in rows)])


def _model(run_file: RunFile) -> str:
    return f"{run_file.model.path} ({run_file.model.dtype})"


def _learns(run_file: RunFile) -> str:
    rollout, trainer = run_file.rollout, run_file.trainer
    updates = trainer.updates_per_step * trainer.epochs_per_step
    answers = f" x {rollout.samples_per_prompt} answers"
    if not run_file.algorithm.learns_from_rollouts:
        answers = ""
    return (
        f"{getattr(run_file.algorithm, 'kind', '')}: {rollout.prompts_per_step} prompts{answers} "
        f"a step, {updates} update{'s' if updates > 1 else ''} with lr {trainer.lr:g}"
        f"{_parts(run_file)}"
    )


def _parts(run_file: RunFile) -> str:
    """What is in processes of its own."""
    engine, trainer = run_file.engine, run_file.trainer
    found = []
    if isinstance(trainer, FSDPTrainerConfig):
        found.append(f"{trainer.ranks} FSDP rank{'s' if trainer.ranks > 1 else ''}")
    if isinstance(engine, ServedEngineConfig):
        count = len(engine.urls) or engine.replicas
        found.append(f"{count} {engine.kind} server{'s' if count > 1 else ''}")
    where = " on Ray" if run_file.cluster.runtime == "ray" else ""
    return f", {' and '.join(found)}{where}" if found else ""


def _policy(run_file: RunFile, name: str) -> str:
    view = run_file.view(name)
    if not run_file.policies[name].learns:
        return f"{_model(view)}, does not learn"
    leads = ", leads" if name == run_file.leader else ""
    own = ", on data of its own" if run_file.policies[name].data is not None else ""
    return f"{_model(view)}, {_learns(view)}{own}{leads}"


def _role(role: str, by: RoleConfig) -> str:
    if by.policy is not None:
        return role if role == by.policy else f"{role} (by {by.policy})"
    return f"{role} (by {f'earlier {by.past}' if by.past else by.url})"


def explain_key(
    key: Annotated[
        str,
        typer.Argument(
            show_default=False,
            help="A key, a block, a kind of a block or a metric.",
            autocompletion=complete_key,
        ),
    ] = "",
    debug: Debug = False,
) -> None:
    """Say what a key of a run file means: type, unit, default, and what it interacts with.

    [bold]Examples[/bold]

    [cyan]paceline explain[/cyan] lists the blocks

    [cyan]paceline explain trainer.lr[/cyan] one key

    [cyan]paceline explain algorithm.grpo[/cyan] one kind of a block

    [cyan]paceline explain train/clip_fraction[/cyan] a metric
    """
    typer.echo(explain(key))


def try_reward(
    run_file: RunFilePath,
    completions: Annotated[
        Path,
        typer.Argument(
            help="JSON lines with `completion`, and `id`, `prompt`, `answer` or other columns."
        ),
    ],
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Run the reward of a run file on given completions; exit code 1 if one can not be scored.

    [bold]Example[/bold]

    [cyan]paceline reward-test run.toml completions.jsonl[/cyan]

    where a line is [cyan]{"prompt": "1+1=", "answer": "2", "completion": " 2"}[/cyan]
    """
    import asyncio

    from paceline.rollout.reward_check import read_answers

    loaded = load_run_file(run_file, overrides or (), purpose="reward")
    checked = asyncio.run(_check(loaded, read_answers(completions)))
    for found in checked:
        typer.echo(describe_score(found))
    values = [found.score.value for found in checked if found.score.value is not None]
    mean = f"{sum(values) / len(values):.4g}" if values else "none"
    num_failed = len(checked) - len(values)
    typer.echo(f"{len(checked)} completions, {num_failed} not scored, mean {mean}")
    if num_failed:
        raise typer.Exit(1)


async def _check(run_file: RunFile, answers: Sequence[Answer]) -> list[CheckedAnswer]:
    from paceline.rollout.reward_check import check_reward
    from paceline.rollout.rewards import build_reward

    async with build_reward(run_file.reward, base=run_file.base) as reward:
        return await check_reward(reward, answers)


def describe_score(checked: CheckedAnswer) -> str:
    """One line: the value, the prompt, the answer, and the parts or the cause of the failure."""
    score, answer = checked.score, checked.answer
    shown = "failed" if score.value is None else f"{score.value:.4g}"
    parts = "".join(f"  {name}={value:.4g}" for name, value in score.parts.items())
    cause = f"  {score.cause}: {score.detail}" if score.cause else ""
    text = answer.completion
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return f"{shown:>8}  {answer.prompt.id}  {text!r}{parts}{cause}"
