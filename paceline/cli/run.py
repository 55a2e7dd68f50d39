"""Commands that run a model: train, sft, eval, generate."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import Best, Debug, Overrides, PolicyName, RunFilePath, Step
from paceline.cli.tables import describe_report, describe_result
from paceline.cli.targets import CHECKPOINTS
from paceline.config import RunFile, load_block, load_run_file, load_settings, render_run_file
from paceline.config.source import read_toml
from paceline.engines.base import Sampling
from paceline.errors import ConfigError
from paceline.types import Message

Resume = Annotated[
    bool | None,
    typer.Option(
        "--resume/--no-resume",
        show_default=False,
        help="Demand a checkpoint to go on from, or refuse one. Default: go on from the newest "
        "checkpoint of the run's folder if it has one, else start.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, print the resolved file, and stop.")
]


def train(
    run_file: RunFilePath,
    overrides: Overrides = None,
    resume: Resume = None,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Train a model as a run file says. Started again, a run goes on where it was.

    [bold]Examples[/bold]

    [cyan]paceline train run.toml[/cyan]

    [cyan]paceline train run.toml trainer.lr=1e-5 'rollout.sampling.stop=["\\n"]'[/cyan]

    [cyan]paceline train run.toml run.name=second --no-resume[/cyan]
    """
    _train(load_run_file(run_file, [*(overrides or ()), *resume_override(resume)]), dry_run)


def sft(
    run_file: RunFilePath,
    overrides: Overrides = None,
    resume: Resume = None,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Supervised training on the completions of the data: `train` with algorithm.kind = "sft".

    [bold]Example[/bold]

    [cyan]paceline sft warmup.toml[/cyan]
    """
    kind = _algorithm_kind(run_file, overrides or ())
    if kind not in (None, "sft"):
        raise ConfigError(
            f"{run_file}: algorithm.kind is {kind!r}, but `paceline sft` is supervised training: "
            'write kind = "sft", leave [algorithm] out, or use `paceline train`'
        )
    chosen = [*(overrides or ()), *resume_override(resume), "algorithm.kind=sft"]
    _train(load_run_file(run_file, chosen), dry_run)


def resume_override(resume: bool | None) -> list[str]:
    """What --resume and --no-resume mean for the run file."""
    if resume is None:
        return []
    return ["run.resume=must" if resume else "run.resume=never"]


def _algorithm_kind(path: Path, overrides: Sequence[str]) -> Any:
    tables, _ = read_toml(path)
    block = tables.get("algorithm")
    kind = block.get("kind") if isinstance(block, dict) else None
    for text in overrides:
        key, _, value = text.partition("=")
        if key.strip() == "algorithm.kind":
            kind = value.strip().strip("\"'") or None
    return kind


def _train(run_file: RunFile, dry_run: bool) -> None:
    if dry_run:
        typer.echo(render_run_file(run_file))
        return
    try:
        from paceline import build

        result = build.train(run_file)
    except KeyboardInterrupt:
        _tell_interrupted(run_file)
        raise typer.Exit(130) from None
    except SystemExit as end:
        from paceline.build.loop import Terminated

        if isinstance(end, Terminated):
            _tell_interrupted(run_file)
        raise
    typer.echo(describe_result(result))
    if not result.samples and run_file.run.num_steps != 0:
        typer.echo("no step was left to do: raise run.num_steps, or choose another run.name")


def _tell_interrupted(run_file: RunFile) -> None:
    if not any((run_file.run_dir / CHECKPOINTS).glob("step-*")):
        follows = "holds no checkpoint yet, so the same command begins anew"
    elif run_file.run.resume == "never":
        follows = "holds what was saved; --resume goes on from there"
    else:
        follows = "holds what was saved, and the same command goes on from there"
    typer.echo(f"\ninterrupted; {run_file.run_dir} {follows}", err=True)


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT|MODEL",
            help="A run's folder, a checkpoint, a model folder or a model id.",
        ),
    ],
    overrides: Overrides = None,
    config: Annotated[
        Path | None,
        typer.Option(
            show_default=False, help="Run file with [[evals.sets]]; default: that of the run."
        ),
    ] = None,
    step: Step = None,
    best: Best = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    policy: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="With a model and a run file of several policies: which of them it stands for.",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Measure a checkpoint or a model on the eval sets of a run file.

    [bold]Examples[/bold]

    [cyan]paceline eval runs/demo[/cyan] the newest checkpoint of a run

    [cyan]paceline eval runs/demo --step 40[/cyan]

    [cyan]paceline eval path/to/model --config run.toml evals.sets.0.limit=100[/cyan]
    """
    from paceline.cli.targets import find_target

    found = find_target(target, step=step, best=best)
    path = config or found.run_file
    if path is None:
        what = "has no run file of its own" if Path(target).exists() else "is no folder"
        raise ConfigError(f"{target} {what}: to measure a model, add --config run.toml")
    chosen = list(overrides or ())
    if found.step is None:
        block = "model" if policy is None else f"policies.{policy}.model"
        chosen.append(f"{block}.path={json.dumps(found.model)}")
    run_file = load_run_file(path, chosen, purpose="eval")
    if run_file.policies and found.step is None and policy is None:
        raise ConfigError(
            f"{path} has the policies {', '.join(run_file.policies)}: say by --policy which of "
            "them the model stands for, or name a run's folder or a checkpoint"
        )
    from paceline import build

    weights = None if found.step is None else Path(found.model)
    report = build.evaluate(run_file, weights=weights, checkpoint=found.checkpoint)
    typer.echo(json.dumps(report.values, indent=2) if as_json else describe_report(report))
    for name, reason in report.skipped.items():
        typer.echo(f"error: eval set {name!r} has no numbers: {reason}", err=True)
    if report.skipped:
        raise typer.Exit(1)


def generate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT|MODEL",
            help="A run's folder, a checkpoint, a model folder or a model id.",
        ),
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", "-p", show_default=False, help="May be repeated; default: lines of stdin."
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Send each prompt as a user's message, by the chat template."),
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 takes the most likely token each time.")
    ] = 1.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="1 keeps all tokens.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds give equal answers.")] = 0,
    step: Step = None,
    best: Best = False,
    policy: PolicyName = None,
    debug: Debug = False,
) -> None:
    """Let a model answer prompts.

    [bold]Examples[/bold]

    [cyan]paceline generate runs/demo --prompt "12+30="[/cyan]

    [cyan]paceline generate org/model --chat -p "Hello" --temperature 0 --max-tokens 32[/cyan]
    """
    from paceline.cli.targets import find_target

    prompts = prompt or [line.rstrip("\n") for line in sys.stdin]
    if not prompts:
        raise ConfigError("there is no prompt: add --prompt, or write lines to stdin")
    for number, text in enumerate(prompts, start=1):
        _check_prompt(text, f"prompt {number} of {'--prompt' if prompt else 'stdin'}")
    drawn = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    sampling = load_block(Sampling, drawn, "sampling")
    found = find_target(target, step=step, best=best, policy=policy)
    run_file = load_settings({"model.path": found.model}, purpose="generate")
    from paceline import build

    asked = [[Message(role="user", content=text)] for text in prompts] if chat else prompts
    answers = build.generate(
        run_file.located_model, run_file.embedded_engine, asked, sampling, seed=seed
    )
    for question, answer in zip(prompts, answers, strict=True):
        typer.echo(f"> {question}\n{answer}\n" if len(prompts) > 1 else answer)


def _check_prompt(text: str, what: str) -> None:
    if not text.strip():
        raise ConfigError(f"{what} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # The shell's bytes that are no UTF-8 arrive as lone surrogates.
        raise ConfigError(
            f"{what} is not valid UTF-8 at character {error.start + 1}: {text[:60]!a}"
        ) from None
