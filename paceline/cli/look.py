"""Commands about run files: check, explain, reward-test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import Debug, Overrides, RunFilePath, complete_key
from paceline.config import RunFile, load_run_file, render_run_file
from paceline.explain import explain

if TYPE_CHECKING:
    from paceline.rollout.reward_check import Answer, CheckedAnswer


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
    run, rollout, trainer = run_file.run, run_file.rollout, run_file.trainer
    if run.num_epochs is not None:
        length = f"{run.num_epochs} epochs"
    else:
        length = f"{run.num_steps} steps" if run.num_steps else "evals only"
    kind = getattr(run_file.algorithm, "kind", "")
    updates = trainer.updates_per_step * trainer.epochs_per_step
    answers = f" x {rollout.samples_per_prompt} answers"
    if not run_file.algorithm.learns_from_rollouts:
        answers = ""
    sources = [source.label for source in run_file.data.all_sources] if run_file.data else []
    is_started = any((run_file.run_dir / "checkpoints").glob("step-*"))
    goes_on = ", which has checkpoints to go on from" if is_started else ""
    rows = {
        "run": f"{run.name}: {length}, files in {run_file.run_dir}{goes_on}",
        "model": f"{run_file.model.path} ({run_file.model.dtype})",
        "data": ", ".join(sources) or "given in Python",
        "learns": f"{kind}: {rollout.prompts_per_step} prompts{answers} a step, {updates} "
        f"update{'s' if updates > 1 else ''} with lr {trainer.lr:g}",
        "evals": ", ".join(eval_set.name for eval_set in run_file.evals.sets) or "none",
        "saves": f"every {run_file.checkpoint.every} steps"
        if run_file.checkpoint.every != "never"
        else "never",
    }
    lines = [f"{path} is right."]
    return "\n".join([*lines, *(f"  {name:<8}{text}" for name, text in rows.items())])


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
