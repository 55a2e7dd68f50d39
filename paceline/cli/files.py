"""Commands about what a run left: inspect, export."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import Best, Debug, PolicyName, Step
from paceline.errors import ConfigError, DataError
from paceline.observe.samples import SampleRecord, find_samples, read_samples


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
    best: Annotated[int, typer.Option(min=0, help="How many of the highest reward.")] = 2,
    worst: Annotated[int, typer.Option(min=0, help="How many of the lowest reward.")] = 2,
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
    if not run.is_dir():
        raise ConfigError(f"there is no folder {run}: name the folder of a run, such as runs/demo")
    found, path = find_samples(run / "samples", step)
    records = read_samples(path)
    typer.echo(f"step {found}: {summarise(records)}")
    if prompt is not None:
        chosen = [record for record in records if record.prompt_id == prompt]
        if not chosen:
            raise DataError(f"step {found} has no sample of prompt {prompt!r}")
        sections = [("samples", chosen)]
    else:
        ranked = sorted(
            (record for record in records if record.reward is not None),
            key=lambda record: record.reward or 0.0,
            reverse=True,
        )
        sections = [("best", ranked[:best]), ("worst", ranked[len(ranked) - worst :][::-1])]
    for title, section in sections:
        for record in section:
            typer.echo(f"\n-- {title} {describe_sample(record)}")


def summarise(records: list[SampleRecord]) -> str:
    """128 samples, reward 0.4125 from 0 to 1; 120 completed, 8 truncated; 16 dropped"""
    rewards = [record.reward for record in records if record.reward is not None]
    counts = Counter(record.status for record in records)
    text = f"{len(records)} samples"
    if rewards:
        mean = sum(rewards) / len(rewards)
        text += f", reward {mean:.4g} from {min(rewards):.4g} to {max(rewards):.4g}"
    if counts:
        text += "; " + ", ".join(f"{count} {status}" for status, count in counts.most_common())
    dropped = sum(record.dropped is not None for record in records)
    return text + (f"; {dropped} dropped" if dropped else "")


def describe_sample(record: SampleRecord) -> str:
    """A header line with the numbers, then prompt and answer."""
    facts = [f"prompt {record.prompt_id}", f"episode {record.episode}"]
    facts.append("no reward" if record.reward is None else f"reward {record.reward:.4g}")
    facts += [f"{name} {value:.4g}" for name, value in record.parts.items()]
    if isinstance(record.advantage, float):
        facts.append(f"advantage {record.advantage:+.3f}")
    facts += [f"{record.num_tokens} tokens", record.status]
    facts += [f"version {record.versions[-1]}"] if record.versions else []
    facts += [f"dropped: {record.dropped}"] if record.dropped else []
    facts += [record.cause] if record.cause else []
    return "\n".join([", ".join(facts), visible(record.prompt), ">> " + visible(record.text)])


def visible(text: str) -> str:
    """Without characters that a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
