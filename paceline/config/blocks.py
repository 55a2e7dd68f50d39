"""The blocks of a run file, assembled. Each block's class stands beside the code it configures."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from paceline.algorithms import ALGORITHMS
from paceline.checkpoint_settings import CheckpointConfig
from paceline.cluster.settings import ClusterConfig
from paceline.config.policies import POLICY_BLOCKS, AlgorithmConfig, PolicyConfig
from paceline.data.sources import DataConfig
from paceline.drivers.memory import MemoryConfig
from paceline.drivers.schedule_settings import ScheduleConfig
from paceline.engines.base import AnyEngineConfig, EmbeddedEngineConfig
from paceline.evals_settings import EvalsConfig
from paceline.models import ModelConfig
from paceline.observe.settings import ObserveConfig
from paceline.rollout.role_settings import RoleConfig
from paceline.rollout.settings import RewardConfig, RolloutConfig
from paceline.teachers.base import TeacherConfig
from paceline.trainers.base import AnyTrainerConfig, CriticConfig, SingleTrainerConfig
from paceline.types import Config
from paceline.weights.settings import WeightCheckConfig

SHARED = "shared"
"""Name of the feed that all policies without data of their own take part in."""
POLICY = "policy"
"""Name of the only policy of a run file without `[policies]`."""


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
    leader: str | None = None
    """With several policies: the one whose steps count for `num_steps`, saves, evals and the end
    of the run; default: the first that learns."""
    driver: Literal["auto", "sync", "multi"] = "auto"
    """`sync`: one policy; sample, learn and publish in turn. `multi`: each policy at its own pace,
    and sampling may run ahead (`[schedule]`). `auto`: what the file needs."""
    deterministic: bool = False
    """With `multi`: engines take turns, so that a run is reproducible bit for bit, also over a
    kill and a resume. Needs `max_staleness` = 0 and `on_full` = "wait" everywhere; the `sync`
    driver always is."""
    gate_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """With several policies: seconds that a save or an eval may wait for the others to come to
    rest; after that the run ends with a report of what each was doing."""
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
    trainer: AnyTrainerConfig = SingleTrainerConfig()
    """What changes the weights; the default kind is `single`."""
    critic: CriticConfig | None = None
    """A second model that predicts the return. Only with an algorithm that needs one, such as
    `ppo`; its defaults apply where it is left out."""
    teacher: TeacherConfig | None = None
    """The model that grades each token of the answers. Only with an algorithm that needs one, such
    as `distill`."""
    engine: AnyEngineConfig = EmbeddedEngineConfig()
    """What makes the tokens; the default kind is `embedded`."""
    evals: EvalsConfig = EvalsConfig()
    """On which prompts, how often and how the policy is measured."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run is saved and which checkpoints stay."""
    observe: ObserveConfig = ObserveConfig()
    """What the run shows and keeps besides its metrics."""
    memory: MemoryConfig = MemoryConfig()
    """What moves when engine and trainer share a device."""
    weight_check: WeightCheckConfig = WeightCheckConfig()
    """Whether engines hold what their trainers sent."""
    cluster: ClusterConfig = ClusterConfig()
    """What starts the processes of trainers and servers, and on which devices."""
    schedule: ScheduleConfig = ScheduleConfig()
    """How far sampling may run ahead of training, and when weights are published."""
    policies: dict[str, PolicyConfig] = Field(default_factory=dict)
    """Several policies in one run, by name."""
    roles: dict[str, RoleConfig] = Field(default_factory=dict)
    """Who plays which role of the environment; default: each policy of the shared episodes plays
    the role of its own name."""

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
    def views(self) -> dict[str, RunFile]:
        """The file as each policy sees it: its own blocks in the place of those at the top."""
        return {name: self.view(name) for name in self.policies} or {POLICY: self}

    def view(self, name: str) -> RunFile:
        """The file as one policy sees it."""
        if not self.policies:
            return self
        own = self.policies[name]
        blocks: dict[str, Any] = {block: getattr(own, block) for block in POLICY_BLOCKS}
        if own.data is None:
            blocks["data"], blocks["reward"] = self.data, self.reward
        elif own.reward is None:
            blocks["reward"] = self.reward
        if own.teacher is None and own.algorithm.needs_teacher:
            blocks["teacher"] = self.teacher
        return self.model_copy(update=blocks)

    @property
    def learners(self) -> tuple[str, ...]:
        """Names of the policies that learn."""
        if not self.policies:
            return (POLICY,)
        return tuple(name for name, policy in self.policies.items() if policy.learns)

    @property
    def leader(self) -> str:
        """The policy whose steps count for the run; where nothing learns, the first."""
        return self.run.leader or next(iter((*self.learners, *self.policies)))

    @property
    def shared_policies(self) -> tuple[str, ...]:
        """Names of the policies that take part in the shared episodes."""
        return tuple(n for n, p in self.policies.items() if p.data is None) or (
            () if self.policies else (POLICY,)
        )

    @property
    def cast(self) -> dict[str, RoleConfig]:
        """Role of the shared environment -> who plays it."""
        if self.roles:
            return self.roles
        return {name: RoleConfig(policy=name) for name in self.shared_policies}

    @property
    def is_multi(self) -> bool:
        """True if the driver of several clocks is needed or asked for."""
        if self.run.driver != "auto":
            return self.run.driver == "multi"
        is_plain = not self.policies and not self.roles
        return not is_plain or self.schedule.runs_ahead or self.schedule.publish_every > 1

    @property
    def is_held_here(self) -> bool:
        """True if this process samples from the model or trains it itself."""
        return isinstance(self.engine, EmbeddedEngineConfig) or isinstance(
            self.trainer, SingleTrainerConfig
        )

    @property
    def single_trainer(self) -> SingleTrainerConfig:
        """The trainer's settings, for one in this process."""
        own = SingleTrainerConfig.model_fields.keys() - {"kind"}
        return SingleTrainerConfig(**{name: getattr(self.trainer, name) for name in own})

    @property
    def embedded_engine(self) -> EmbeddedEngineConfig:
        """The engine's settings, for one in this process."""
        if isinstance(self.engine, EmbeddedEngineConfig):
            return self.engine
        return EmbeddedEngineConfig(max_context=self.engine.max_context)

    def in_one_process(self) -> RunFile:
        """The same run with its engine and trainer in this process: equal numbers, slower."""
        return self.model_copy(
            update={
                "trainer": self.single_trainer,
                "engine": self.embedded_engine,
                "cluster": ClusterConfig(),
            }
        )

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
        if self.teacher is not None and self.teacher.model is not None:
            found["teacher", "model"] = self.teacher.model
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
    for name in ("path", "tokenizer", "chat_template", "adapter"):
        value = getattr(model, name)
        if value is not None:
            path = base / os.path.expanduser(value)
            found[name] = str(path) if path.exists() or looks_like_path(value) else value
    return model.model_copy(update=found)


def looks_like_path(text: str) -> bool:
    """True for what can only be a path: `./x`, `../x`, `/x`, `~/x`, or more than one slash."""
    return text.startswith((".", "/", "~")) or text.count("/") > 1 or "\\" in text
