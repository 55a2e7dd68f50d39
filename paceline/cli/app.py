"""The application: every command, in the order of `paceline --help`."""

from __future__ import annotations

import functools
import platform
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer

from paceline.cli.files import export, inspect
from paceline.cli.look import check, explain_key, try_reward
from paceline.cli.options import Debug
from paceline.cli.replay import replay
from paceline.cli.run import evaluate, generate, sft, train
from paceline.errors import PacelineError

RUN, WRITE, KEEP = "Train and measure", "Write run files", "After a run"

COMMANDS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("train", RUN, train),
    ("sft", RUN, sft),
    ("eval", RUN, evaluate),
    ("generate", RUN, generate),
    ("check", WRITE, check),
    ("explain", WRITE, explain_key),
    ("reward-test", WRITE, try_reward),
    ("inspect", KEEP, inspect),
    ("replay", KEEP, replay),
    ("export", KEEP, export),
)

app = typer.Typer(
    name="paceline",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Paceline trains language models by reinforcement learning.\n\n"
        "Start with [bold]paceline check run.toml[/bold], then "
        "[bold]paceline train run.toml[/bold]. "
        "[bold]paceline explain[/bold] shows what can stand in a run file."
    ),
    epilog="Exit codes: 0 done; 1 the run failed; 2 something given is wrong; 130 Ctrl-C.",
)


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command, of which a SystemExit is not taken for success: none of ours raises one.

    User code that runs in this process may call `sys.exit`; only SIGTERM ends a command that way.
    """

    @functools.wraps(command)
    def call(*given: Any, **options: Any) -> Any:
        try:
            return command(*given, **options)
        except SystemExit as end:
            from paceline.build.loop import Terminated

            if isinstance(end, Terminated):
                raise
            last = traceback.extract_tb(end.__traceback__)[-1]
            raise PacelineError(
                f"{last.filename}:{last.lineno} ended the program by SystemExit({end.code!r}), "
                "before the command was done: take the call of exit out of code that a run uses"
            ) from end

    return call


def print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        typer.echo(f"paceline {version('paceline')} (Python {platform.python_version()})")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True),
    ] = False,
    debug: Debug = False,
) -> None:
    """Options of every command."""


for name, panel, function in COMMANDS:
    app.command(name, rich_help_panel=panel)(guarded(function))
