"""What a checkpoint holds: reading a complete one, filling a staged one."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.state import RunState
from paceline.errors import CheckpointError
from paceline.observe.files import Files, encode_json
from paceline.types import JsonValue

CRITIC = "critic"
POLICY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def step_name(step: int) -> str:
    return f"step-{step:06d}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    folder: Path
    manifest: Manifest

    def state(self) -> RunState:
        """Read this first."""
        return RunState.from_json(self.read_json("state.json"), str(self.folder / "state.json"))

    def read_json(self, name: str) -> Any:
        path = self.folder / name
        try:
            return json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} can not be read: {error}") from error

    def policy_folder(self, name: str) -> Path:
        """Where the trainer of a policy wrote; raises CheckpointError if it is not there."""
        folder = self.folder / "policies" / name
        if not folder.is_dir():
            found = sorted(p.name for p in (self.folder / "policies").glob("*"))
            raise CheckpointError(f"{self.folder} has no policy {name!r}, only {found}")
        return folder

    def critic_folder(self, name: str) -> Path:
        """Where the trainer of a policy's critic wrote; raises CheckpointError if there is none."""
        folder = self.policy_folder(name) / CRITIC
        if not folder.is_dir():
            raise CheckpointError(f"{self.folder} has no critic of policy {name!r}")
        return folder


@dataclass(frozen=True, slots=True)
class Skipped:
    """A folder that is no complete checkpoint."""

    folder: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found, newest first in `skipped`."""

    checkpoint: Checkpoint | None
    skipped: list[Skipped]


@dataclass(frozen=True, slots=True)
class Staged:
    """A checkpoint in the making."""

    step: int
    folder: Path
    files: Files = field(repr=False)

    def policy_folder(self, name: str) -> Path:
        """An empty folder for the trainer of a policy to write into."""
        if not POLICY_NAME.fullmatch(name):
            raise CheckpointError(f"{name!r} can not name a folder: use letters, digits, . _ -")
        folder = self.folder / "policies" / name
        self.files.make_folder(folder)
        return folder

    def critic_folder(self, name: str) -> Path:
        """An empty folder for the trainer of the policy's critic, inside the policy's own."""
        folder = self.folder / "policies" / name / CRITIC
        self.files.make_folder(folder)
        return folder

    def write_json(self, name: str, value: JsonValue) -> None:
        """Durable after the commit."""
        self.write(name, encode_json(value, indent=1))

    def write_state(self, state: RunState) -> None:
        self.write("state.json", state.encode())

    def write(self, name: str, data: bytes) -> None:
        """What `write_json` writes, encoded before. Durable after the commit."""
        self.files.write(self.folder / name, data)
