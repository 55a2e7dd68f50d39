"""The command that does a recorded step again: replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import Debug, Overrides, PolicyName, RunFolder
from paceline.cli.tables import columns
from paceline.errors import ConfigError, DataError, PacelineError

if TYPE_CHECKING:
    from paceline.build.compare import Difference
    from paceline.build.replay import Replay

MOST_SHOWN = 20
"""Differences of one part that are printed; `--json` has all."""


def replay(
    run: RunFolder,
    overrides: Overrides = None,
    step: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Default: the last one.")
    ] = None,
    policy: PolicyName = None,
    tolerance: Annotated[
        float,
        typer.Option(min=0, help="Relative difference that is allowed; raise it for bfloat16."),
    ] = 1e-4,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Do a step again from its samples and the weights before it, and report every difference.

    Compared are rewards, advantages, log-probs, losses, gradient norms and all other numbers of
    training. It needs the checkpoint of the step before (checkpoint.every = 1); for step 1, the
    model of the run file. Nothing on disk is changed.

    Exit codes: 0 all agree; 1 something differs; 2 the step can not be replayed.

    [bold]Examples[/bold]

    [cyan]paceline replay runs/demo --step 1[/cyan]

    [cyan]paceline replay runs/demo --step 21 reward.function=rewards.py:score[/cyan]
    """
    from paceline.build import replay as replaying
    from paceline.build.compare import Tolerance
    from paceline.observe.files import encode_json

    try:
        result = replaying.replay(
            run, step, overrides or (), policy=policy, tolerance=Tolerance(tolerance)
        )
    except (ConfigError, DataError):
        raise
    except PacelineError as error:
        which = "the last step" if step is None else f"step {step}"
        raise DataError(f"{which} can not be replayed: {error}") from error
    if as_json:
        typer.echo(encode_json(result.to_json(), indent=2).decode(), nl=False)
    else:
        typer.echo("\n".join(describe(result)))
    if result.differences:
        raise typer.Exit(1)


def describe(result: Replay) -> Iterator[str]:
    """What was compared, the main numbers, and what differs."""
    yield f"step {result.step} of {result.run_dir}, done again from {result.weights}"
    yield ""
    counts = {part: num for part, num in result.compared.items() if num}
    differing = [difference.part for difference in result.differences]
    rows = [(part, str(num), str(differing.count(part))) for part, num in counts.items()]
    yield from columns([("", "compared", "differ"), *rows])
    main = [name for name in result.metrics if name.endswith(("/loss", "/grad_norm", "/reward"))]
    if main:
        yield ""
        numbers = [(name, *(f"{value:.8g}" for value in result.metrics[name])) for name in main]
        yield from columns([("", "recorded", "replayed"), *numbers])
    for note in result.notes:
        yield from ("", f"note: {note}")
    yield ""
    relative, absolute = result.tolerance.relative, result.tolerance.absolute
    allowed = f"within {relative:g} of the larger number, or {absolute:g}; rewards within 1e-06"
    if not result.differences:
        yield f"all agree ({allowed})"
        return
    yield f"{len(result.differences)} differences (not {allowed}):"
    for part in counts:
        found = [item for item in result.differences if item.part == part]
        yield from _few(found)


def _few(differences: Sequence[Difference]) -> Iterator[str]:
    for difference in differences[:MOST_SHOWN]:
        yield f"  {difference}"
    left = len(differences) - MOST_SHOWN
    if left > 0:
        yield f"  ... and {left} more of this kind; --json has all"
