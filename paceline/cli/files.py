"""Commands about what a run left: inspect, export."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import Best, Debug, PolicyName, Step
from paceline.errors import ConfigError, DataError


def export(
    source: Annotated[
        str, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run's folder or a checkpoint.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to make; it must not exist.")],
    step: Step = None,
    best: Best = False,
    policy: PolicyName = "policy",
    debug: Debug = False,
) -> None:
    """Copy the model of a checkpoint, in Hugging Face format with its tokenizer.

    Every file of the checkpoint is verified by its hash first.

    [bold]Examples[/bold]

    [cyan]paceline export runs/demo my-model[/cyan] the newest checkpoint

    [cyan]paceline export runs/demo my-model --best[/cyan]
    """
    from paceline.cli.targets import find_target

    target = find_target(source, step=step, best=best, policy=policy)
    if target.step is None:
        raise ConfigError(f"{source} is a model already: name a run's folder or a checkpoint")
    copy_folder(Path(target.model), out)
    typer.echo(f"{out}: the model of step {target.step}")


def copy_folder(source: Path, out: Path) -> None:
    """Copy a folder so that `out` is there in whole or not at all."""
    if out.exists():
        raise ConfigError(f"{out} exists: name a folder that does not")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(source, partial)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def inspect(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, such as runs/demo.")],
    step: Annotated[
        int | None, typer.Option(min=0, show_default=False, help="Default: the last one.")
    ] = None,
    best: Annotated[int, typer.Option(min=0, help="How many of the highest reward.")] = 3,
    worst: Annotated[int, typer.Option(min=0, help="How many of the lowest reward.")] = 3,
    first: Annotated[int, typer.Option(min=0, help="How many in the order of the draws.")] = 0,
    prompt: Annotated[
        str | None,
        typer.Option(show_default=False, help="Instead: all samples of the prompt with this id."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Show samples of a step with their rewards: the best, the worst, or all of a prompt.

    [bold]Examples[/bold]

    [cyan]paceline inspect runs/demo[/cyan]

    [cyan]paceline inspect runs/demo --step 40 --best 5 --worst 0[/cyan]

    [cyan]paceline inspect runs/demo --prompt add-17[/cyan]
    """
    from rich.console import Console

    from paceline.observe.samples import find_samples, read_samples
    from paceline.observe.samples_view import samples_table, show_samples

    if not run.is_dir():
        raise ConfigError(f"there is no folder {run}: name the folder of a run, such as runs/demo")
    console = Console()
    if prompt is None:
        show_samples(console, run, step, best=best, worst=worst, first=first)
        return
    found, path = find_samples(run / "samples", step)
    chosen = [record for record in read_samples(path) if record.prompt_id == prompt]
    if not chosen:
        raise DataError(f"step {found} has no sample of prompt {prompt!r}")
    console.print(samples_table(chosen, f"step {found}, prompt {prompt}"))
