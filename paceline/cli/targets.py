"""What a command is pointed at: a run's folder, a checkpoint, or a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint import Checkpoint, CheckpointStore
from paceline.checkpoint_settings import CheckpointConfig
from paceline.config.blocks import POLICY, looks_like_path
from paceline.errors import CheckpointError, ConfigError

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True)
class Target:
    """A model to work with, and the run that it comes from.

    Example: Target(model="runs/x/checkpoints/step-000020/policies/policy/model", step=20,
    run_dir=Path("runs/x")); a plain model has neither step nor run.
    """

    model: str
    """Folder, or a model id."""
    step: int | None = None
    run_dir: Path | None = None
    policy: str = POLICY
    """Whose model it is."""
    checkpoint: Checkpoint | None = None
    """What it is a part of."""

    @property
    def run_file(self) -> Path | None:
        """The resolved run file of the run."""
        path = self.run_dir / "run.toml" if self.run_dir else None
        return path if path is not None and path.is_file() else None


def find_target(
    name: str, *, step: int | None = None, best: bool = False, policy: str | None = None
) -> Target:
    """The model that a path or id names; its checkpoint's hashes are verified.

    A run's folder stands for its newest complete checkpoint, or the one of `step`, or the best.
    policy: which one of it; default: its leader. Raises ConfigError or CheckpointError if there is
    none.
    """
    folder = Path(name).expanduser()
    if (folder / CHECKPOINTS).is_dir():
        return _of_run(folder, step=step, best=best, policy=policy)
    if step is not None or best:
        raise ConfigError(f"{name}: --step and --best need the folder of a run")
    if (folder / "manifest.json").is_file():
        number = folder.name.removeprefix("step-")
        if not number.isdecimal():
            raise ConfigError(f"{name}: a checkpoint is a folder step-<number>")
        return _of_checkpoint(folder.parent, int(number), policy)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            what = (
                "has run.toml but no checkpoints"
                if (folder / "run.toml").is_file()
                else (f"has no {CHECKPOINTS}/, manifest.json or config.json")
            )
            raise ConfigError(
                f"{name} {what}: name a run's folder, a checkpoint or a Hugging Face model"
            )
        return Target(str(folder.absolute()))
    if folder.exists() or looks_like_path(name):
        raise ConfigError(f"there is no folder {name}: name a run, a checkpoint or a model")
    return Target(name)


def _of_run(folder: Path, *, step: int | None, best: bool, policy: str | None) -> Target:
    root = folder / CHECKPOINTS
    if best:
        step = _best_step(root)
    if step is None:
        found = CheckpointStore(root, CheckpointConfig()).newest()
        if found.checkpoint is None:
            reasons = "".join(f"\n  {s.folder.name}: {s.reason}" for s in found.skipped)
            raise CheckpointError(f"{root} has no complete checkpoint{reasons}")
        step = found.checkpoint.step
    return _of_checkpoint(root, step, policy)


def _of_checkpoint(root: Path, step: int, policy: str | None) -> Target:
    checkpoint = CheckpointStore(root, CheckpointConfig()).at(step)
    state = checkpoint.state()
    name = state.leader if policy is None else policy
    if name not in state.policies:
        raise ConfigError(
            f"{checkpoint.folder} has no policy {name!r}; it has {', '.join(state.policies)}"
        )
    model = checkpoint.policy_folder(name) / "model"
    if not model.is_dir():
        raise CheckpointError(f"{checkpoint.folder} has no exported model of policy {name!r}")
    return Target(str(model.absolute()), step, root.parent, name, checkpoint)


def _best_step(root: Path) -> int:
    path = root / "best.json"
    try:
        document = json.loads(path.read_bytes())
        config = CheckpointConfig.model_construct(
            best_metric=document["metric"], best_mode=document["mode"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"{path} is missing or damaged: a run writes it when checkpoint.best_metric is set"
        ) from None
    found = CheckpointStore(root, config).best()
    if found is None:
        raise CheckpointError(f"no checkpoint in {root} has a measured {document['metric']}")
    return found.step
