"""What a run was made with, for whoever wants to repeat it. Reads no environment variables."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from paceline.errors import PacelineError
from paceline.observe.files import clear_leftovers, encode_json, write_atomically
from paceline.types import JsonValue

PACKAGES = ("paceline", "torch", "transformers", "numpy", "safetensors", "tokenizers", "pydantic")
SECRET = re.compile(r"(?i)(?:key|token|secrets?|password|passwd|credentials?)$")
GIT_TIMEOUT_S = 5.0


def describe_environment(
    *,
    threads: int | None = None,
    devices: Sequence[str] = (),
    command: Sequence[str] | None = None,
    folder: Path | None = None,
) -> dict[str, JsonValue]:
    """Versions, platform and command line; the git commit of `folder`, by default the current one.

    `threads`: CPU threads of the trainer. `devices`: names of accelerators, as the caller knows
    them, since this module loads no heavy library. Values of options that sound secret are hidden.
    """
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": threads,
        "devices": list(devices),
        "command": hide_secrets(sys.argv if command is None else command),
        "git": _git(Path.cwd() if folder is None else folder),
    }


def write_environment(folder: Path, environment: dict[str, JsonValue]) -> None:
    """`environment.json` in a run's folder: that of the newest start."""
    path = folder / "environment.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clear_leftovers(folder, path.name)
        write_atomically(path, encode_json(environment, indent=1))
    except OSError as error:
        raise PacelineError(f"can not write {path}: {error}") from error


def hide_secrets(command: Sequence[str]) -> list[str]:
    """Hide what follows an option that sounds secret: `--api-key x`, `wandb.token=x`.

    Example: ["train", "--api-key", "abc"] -> ["train", "--api-key", "***"]
    """
    shown: list[str] = []
    is_next_secret = False
    for word in command:
        name, equals, _ = word.partition("=")
        if is_next_secret and not word.startswith("-"):
            shown.append("***")
        elif equals and SECRET.search(name):
            shown.append(f"{name}=***")
        else:
            shown.append(word)
        is_next_secret = word.startswith("-") and not equals and bool(SECRET.search(name))
    return shown


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(folder: Path) -> dict[str, JsonValue] | None:
    """Commit, and whether tracked files differ from it; None outside a repository."""
    commit = _run_git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _run_git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "is_modified": None if changes is None else bool(changes)}


def _run_git(folder: Path, *words: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
