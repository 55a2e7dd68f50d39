"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.config import RunFile
from paceline.config.fields import keys_of


def complete_override(incomplete: str) -> list[str]:
    """Keys of a run file that start like this, with the `=` to go on from."""
    paths = dict.fromkeys(key.plain_path for key in keys_of(RunFile) if not key.is_block)
    return [f"{path}=" for path in paths if path.startswith(incomplete)]


def complete_key(incomplete: str) -> list[str]:
    """Keys and blocks of a run file that start like this."""
    paths = dict.fromkeys(key.plain_path for key in keys_of(RunFile))
    return [path for path in paths if path.startswith(incomplete)]


RunFilePath = Annotated[
    Path, typer.Argument(metavar="RUN_FILE", help="A TOML run file, such as run.toml.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        show_default=False,
        help="Keys set over the file, such as trainer.lr=1e-5. Values are TOML, bare words are "
        "texts, an empty value takes the key out.",
        autocompletion=complete_override,
    ),
]
RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run's folder, such as runs/demo.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Step = Annotated[
    int | None,
    typer.Option(min=0, show_default=False, help="Step of the checkpoint; default: the newest."),
]
Best = Annotated[
    bool, typer.Option("--best", help="The best checkpoint by checkpoint.best_metric.")
]
PolicyName = Annotated[
    str | None,
    typer.Option(
        "--policy", show_default=False, help="Which of several policies; default: the leader."
    ),
]
