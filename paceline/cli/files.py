"""Commands about what a run left: inspect, export."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import Best, Debug, Overrides, PolicyName, RunFolder, Step
from paceline.config import POLICY
from paceline.errors import ConfigError, DataError, PacelineError, nearest_hint


def export(
    source: Annotated[
        str, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run's folder or a checkpoint.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to make; it must not exist.")],
    step: Step = None,
    best: Best = False,
    policy: PolicyName = None,
    debug: Debug = False,
) -> None:
    """Copy the model of a checkpoint, in Hugging Face format with its tokenizer.

    Every file of the checkpoint is verified by its hash first.

    [bold]Examples[/bold]

    [cyan]paceline export runs/demo my-model[/cyan] the newest checkpoint

    [cyan]paceline export runs/demo my-model --best[/cyan]

    [cyan]paceline export runs/demo my-verifier --policy verifier[/cyan]
    """
    from paceline.cli.targets import find_target

    target = find_target(source, step=step, best=best, policy=policy)
    if target.step is None and not Path(target.model).is_dir():
        raise ConfigError(f"there is no folder {source}: name a run's folder or a checkpoint")
    if target.step is None:
        raise ConfigError(f"{source} is a model already: name a run's folder or a checkpoint")
    copy_folder(Path(target.model), out)
    whose = "" if target.policy == POLICY else f" of policy {target.policy!r}"
    typer.echo(f"{out}: the model{whose} of step {target.step}")


def copy_folder(source: Path, out: Path) -> None:
    """Copy a folder so that `out` is there in whole or not at all."""
    if out.exists():
        raise ConfigError(f"{out} exists: name a folder that does not")
    if not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent.absolute()} to put {out.name} into")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(source, partial)
        partial.rename(out)
    except OSError as error:
        # copytree gathers errors as tuples, each with its reason.
        reason = error.strerror or error.args[0][0][2]
        raise PacelineError(f"{out} can not be written: {reason}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def inspect(
    run: RunFolder,
    overrides: Overrides = None,
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
    eval_set: Annotated[
        str | None,
        typer.Option("--eval", show_default=False, help="Instead: answers to this eval set."),
    ] = None,
    policy: PolicyName = None,
    role: Annotated[
        str | None,
        typer.Option(show_default=False, help="Only what this role of the environment said."),
    ] = None,
    numbers: Annotated[
        bool,
        typer.Option("--numbers", help="Instead: every number of one sample, token by token."),
    ] = False,
    sample: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="With --numbers: best, worst, an index from 0, or PROMPT, PROMPT/EPISODE or "
            "PROMPT/EPISODE/ROW. Default: the first that was trained on.",
        ),
    ] = None,
    ledger: Annotated[
        bool,
        typer.Option("--ledger", help="Instead: what became of every prompt over the whole run."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Show samples of a step with their rewards: the best, the worst, or all of a prompt.

    With --numbers, one sample as the step saw it: mask, log-probs that the engine reported
    (behaviour), before (old) and after the step (new), ratio new / old, advantage, weight in the
    loss and loss of each token; below, what they are made of. Old and new log-probs need the
    checkpoints of the step before and of the step.

    With --ledger, how often each prompt was drawn, dropped and trained on, at which versions of the
    weights, and what is sampled ahead; exit code 1 if a draw was trained on twice, or lost.

    [bold]Examples[/bold]

    [cyan]paceline inspect runs/demo[/cyan]

    [cyan]paceline inspect runs/demo --step 40 --best 5 --worst 0[/cyan]

    [cyan]paceline inspect runs/demo --policy verifier[/cyan] of one of several policies

    [cyan]paceline inspect runs/demo --eval heldout --step 40[/cyan]

    [cyan]paceline inspect runs/demo --step 40 --numbers --sample add-17/2[/cyan]

    [cyan]paceline inspect runs/demo --ledger[/cyan]
    """
    if not run.is_dir():
        raise ConfigError(f"there is no folder {run}: name the folder of a run, such as runs/demo")
    if ledger:
        _show_ledger(run, policy)
        return
    if (sample is not None or overrides) and not numbers:
        raise ConfigError("--sample and KEY=VALUE go with --numbers; see --prompt for all of one")
    if numbers:
        if eval_set is not None or prompt is not None:
            raise ConfigError("--numbers shows one sample of a training step: name it by --sample")
        _show_numbers(run, step, sample, overrides or (), policy)
        return
    folder = _samples_folder(run, eval_set, policy)
    _show_samples(folder, step, prompt, role, best=best, worst=worst, first=first)


def _show_ledger(run: Path, policy: str | None) -> None:
    from paceline.cli.ledger import describe_account, read_accounts

    accounts = read_accounts(run, policy)
    typer.echo("\n\n".join("\n".join(describe_account(account)) for account in accounts))
    violations = [f"{one.policy}: {text}" for one in accounts for text in one.violations]
    if violations:
        listed = "".join(f"\n  {violation}" for violation in violations)
        raise PacelineError(f"{run}: the ledger does not come out even:{listed}")


def _show_numbers(
    run: Path,
    step: int | None,
    sample: str | None,
    overrides: Sequence[str],
    policy: str | None,
) -> None:
    from paceline.build.numbers import sample_numbers
    from paceline.build.recorded import read_step
    from paceline.cli.numbers import choose_sample, describe_numbers

    recorded = read_step(run, step, overrides, policy=policy)
    index = choose_sample(recorded.records, sample)
    typer.echo("\n".join(describe_numbers(sample_numbers(recorded, index))))


def _samples_folder(run: Path, eval_set: str | None, policy: str | None) -> Path:
    """Where the samples that are asked for lie."""
    from paceline.build.recorded import samples_folder
    from paceline.observe.samples import eval_folder, eval_names

    if eval_set is None:
        return samples_folder(run, policy)
    folder = run / "samples"
    names = eval_names(folder)
    if eval_set not in names:
        raise DataError(
            f"{folder} has no answers to an eval set {eval_set!r}"
            f"{nearest_hint(eval_set, names) or '; there are none to any'}"
        )
    return eval_folder(folder, eval_set)


def _show_samples(
    folder: Path,
    step: int | None,
    prompt: str | None,
    role: str | None,
    *,
    best: int,
    worst: int,
    first: int,
) -> None:
    from rich.console import Console

    from paceline.observe.samples import find_samples, read_samples
    from paceline.observe.samples_view import samples_table, show_samples

    console = Console()
    if prompt is None:
        show_samples(console, folder, step, best=best, worst=worst, first=first, role=role)
        return
    found, path = find_samples(folder, step)
    chosen = [
        record
        for record in read_samples(path)
        if record.prompt_id == prompt and role in (None, record.role)
    ]
    if not chosen:
        raise DataError(f"step {found} has no sample of prompt {prompt!r}")
    console.print(samples_table(chosen, f"step {found}, prompt {prompt}"))
