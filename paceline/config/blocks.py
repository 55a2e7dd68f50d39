"""The blocks of a run file, assembled. Each block's class stands beside the code it configures."""

from __future__ import annotations

import functools
import operator
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator

from paceline.algorithms import ALGORITHMS
from paceline.algorithms.base import Algorithm
from paceline.checkpoint_settings import CheckpointConfig
from paceline.data.sources import DataConfig
from paceline.drivers.memory import MemoryConfig
from paceline.engines.base import EmbeddedEngineConfig
from paceline.evals_settings import EvalsConfig
from paceline.models import ModelConfig
from paceline.observe.settings import ObserveConfig
from paceline.rollout.settings import RewardConfig, RolloutConfig
from paceline.trainers.base import CriticConfig, SingleTrainerConfig
from paceline.types import Config

if TYPE_CHECKING:
    AlgorithmConfig = Algorithm
else:
    AlgorithmConfig = Annotated[
        functools.reduce(operator.or_, ALGORITHMS.values()), Field(discriminator="kind")
    ]


class RunConfig(Config):
    """`[run]`: what a run is called, how long it is, and where it leaves its files."""

    name: str = "run"
    """Name of the run and of its folder: letters, digits, `.`, `_` and `-`; default: the name of
    the run file without `.toml`."""
    dir: str = "runs"
    """Folder that holds the folders of all runs; relative to `run.base`."""
    base: str = "."
    """Folder that every relative path of the file starts from; itself relative to the folder of
    the run file. The resolved `run.toml` of a run points back here."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Source of all randomness: equal seeds, settings and CPU thread counts give equal runs."""
    num_steps: Annotated[int, Field(ge=0)] | None = None
    """Steps of the whole run, resumed parts included. Set this or `num_epochs`; 0 only runs the
    evals."""
    num_epochs: Annotated[int, Field(ge=1)] | None = None
    """Passes over the prompts, instead of `num_steps`: a step takes `rollout.prompts_per_step`."""
    resume: Literal["auto", "never", "must"] = "auto"
    """`auto`: go on from the newest complete checkpoint of the run's folder, or start. `never`:
    start, and refuse a folder that has checkpoints. `must`: refuse to start from nothing."""
    debug_exit_after: Annotated[int, Field(ge=1)] | None = None
    """End after this many steps of this start, with learning rates as if it went on: for testing
    that a run resumes."""

    @field_validator("name")
    @classmethod
    def _is_a_folder_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
            raise ValueError(
                f"found {name!r}, allowed: a letter or digit, then letters, digits, `.`, `_` and "
                "`-`, 100 at most; it names the folder of the run"
            )
        return name


class RunFile(Config):
    """A whole run file."""

    run: RunConfig
    """What the run is called, how long it is, and where it leaves its files."""
    model: ModelConfig
    """Which language model, and how it is held."""
    data: DataConfig | None = None
    """The prompts, and how they are brought into shape."""
    rollout: RolloutConfig = RolloutConfig()
    """How many answers a step collects, and which of them it keeps."""
    reward: RewardConfig = RewardConfig()
    """What an answer is worth."""
    algorithm: AlgorithmConfig = ALGORITHMS["grpo"]()
    """What is learned from the answers; the default kind is `grpo`."""
    trainer: SingleTrainerConfig = SingleTrainerConfig()
    """What changes the weights."""
    critic: CriticConfig | None = None
    """A second model that predicts the return. Only with an algorithm that needs one, such as
    `ppo`; its defaults apply where it is left out."""
    engine: EmbeddedEngineConfig = EmbeddedEngineConfig()
    """What makes the tokens."""
    evals: EvalsConfig = EvalsConfig()
    """On which prompts, how often and how the policy is measured."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run is saved and which checkpoints stay."""
    observe: ObserveConfig = ObserveConfig()
    """What the run shows and keeps besides its metrics."""
    memory: MemoryConfig = MemoryConfig()
    """What moves when engine and trainer share a device."""

    @property
    def base(self) -> Path:
        """Folder that relative paths start from; absolute after loading."""
        return Path(self.run.base)

    @property
    def run_dir(self) -> Path:
        """Folder of this run."""
        return self.resolve(self.run.dir) / self.run.name

    def resolve(self, path: str) -> Path:
        """An absolute path of one that the file names."""
        return self.base / os.path.expanduser(path)

    @property
    def located_model(self) -> ModelConfig:
        """The model with its local paths made absolute; ids are left as they are."""
        return locate_model(self.model, self.base)

    @property
    def models(self) -> dict[tuple[str, ...], ModelConfig]:
        """Every model that the file names, by its block."""
        found: dict[tuple[str, ...], ModelConfig] = {("model",): self.model}
        if self.critic is not None and self.critic.model is not None:
            found["critic", "model"] = self.critic.model
        return found

    @property
    def critic_settings(self) -> CriticConfig:
        """Those of `[critic]`, or its defaults."""
        return CriticConfig() if self.critic is None else self.critic

    @property
    def critic_model(self) -> ModelConfig:
        """The model that the critic starts from, as the file names it."""
        return self.critic_settings.model or self.model


def locate_model(model: ModelConfig, base: Path) -> ModelConfig:
    """Absolute paths for what exists below `base` or is written as a path; ids stay ids."""
    found = {}
    for name in ("path", "tokenizer", "chat_template"):
        value = getattr(model, name)
        if value is not None:
            path = base / os.path.expanduser(value)
            found[name] = str(path) if path.exists() or looks_like_path(value) else value
    return model.model_copy(update=found)


def looks_like_path(text: str) -> bool:
    """True for what can only be a path: `./x`, `../x`, `/x`, `~/x`, or more than one slash."""
    return text.startswith((".", "/", "~")) or text.count("/") > 1 or "\\" in text
