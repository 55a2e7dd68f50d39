"""Commands about run files: check, explain, reward-test."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import Debug, Overrides, RunFilePath, complete_key
from paceline.config import RunFile, load_run_file, render_run_file
from paceline.errors import DataError
from paceline.explain import explain
from paceline.types import Prompt


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
            help="JSON lines with `completion`, and `prompt`, `answer` or other columns."
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

    loaded = load_run_file(run_file, overrides or (), purpose="reward")
    rows = list(read_completions(completions))
    failed = asyncio.run(_score_all(loaded, rows))
    if failed:
        raise typer.Exit(1)


def read_completions(path: Path) -> Iterator[tuple[Prompt, str]]:
    """Prompts and completions of a JSON lines file; DataError names the first bad line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can not be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _completion(line, f"{path}:{number}", number)
    if not any(line.strip() for line in lines):
        raise DataError(f"{path} has no completions")


def _completion(line: str, place: str, number: int) -> tuple[Prompt, str]:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: not valid JSON: {error}") from None
    if not isinstance(row, Mapping) or not isinstance(row.get("completion"), str):
        raise DataError(f"{place}: write an object with a text `completion`")
    others = {k: v for k, v in row.items() if k not in ("completion", "prompt", "answer", "id")}
    asked = row.get("prompt", "")
    prompt = Prompt(
        id=str(row.get("id", number)),
        text=asked if isinstance(asked, str) else None,
        messages=None if isinstance(asked, str) else tuple(asked),
        answer=row.get("answer"),
        metadata=others,
    )
    return prompt, row["completion"]


async def _score_all(run_file: RunFile, rows: list[tuple[Prompt, str]]) -> int:
    """Score one after the other and print each; returns how many could not be scored."""
    from paceline.rollout.rewards import build_reward

    values: list[float] = []
    async with build_reward(run_file.reward, base=run_file.base) as reward:
        await reward.start()
        for prompt, completion in rows:
            score = await reward.score(prompt, completion)
            shown = "failed" if score.value is None else f"{score.value:.4g}"
            parts = "".join(f"  {name}={value:.4g}" for name, value in score.parts.items())
            cause = f"  {score.cause}: {score.detail}" if score.cause else ""
            text = completion if len(completion) <= 60 else f"{completion[:57]}..."
            typer.echo(f"{shown:>8}  {prompt.id}  {text!r}{parts}{cause}")
            values += [] if score.value is None else [score.value]
    mean = f"{sum(values) / len(values):.4g}" if values else "none"
    typer.echo(f"{len(rows)} completions, {len(rows) - len(values)} not scored, mean {mean}")
    return len(rows) - len(values)
