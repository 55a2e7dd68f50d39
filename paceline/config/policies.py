"""`[policies.<name>]`: the blocks of one policy, where a run has several.

Every block of a policy starts from the block of the same name at the top of the file, so that a
policy only says what is its own. A block of another `kind` than the top's starts from nothing.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from paceline.algorithms import ALGORITHMS
from paceline.algorithms.base import Algorithm
from paceline.data.sources import DataConfig
from paceline.drivers.schedule_settings import ScheduleConfig
from paceline.engines.base import AnyEngineConfig, EmbeddedEngineConfig
from paceline.models import ModelConfig
from paceline.rollout.settings import RewardConfig, RolloutConfig
from paceline.teachers.base import TeacherConfig
from paceline.trainers.base import AnyTrainerConfig, CriticConfig, SingleTrainerConfig
from paceline.types import Config
from paceline.weights.settings import WeightCheckConfig

if TYPE_CHECKING:
    AlgorithmConfig = Algorithm
else:
    AlgorithmConfig = Annotated[
        functools.reduce(operator.or_, ALGORITHMS.values()), Field(discriminator="kind")
    ]


class PolicyConfig(Config):
    """`[policies.<name>]`: one of several policies. Its blocks start from those at the top."""

    learns: bool = True
    """False: it only plays its roles, with the weights of `model`, and has no trainer."""
    model: ModelConfig
    """Which language model; what is left out is as in `[model]`."""
    algorithm: AlgorithmConfig = ALGORITHMS["grpo"]()
    """What it learns from its samples; what is left out is as in `[algorithm]`."""
    trainer: AnyTrainerConfig = SingleTrainerConfig()
    """What changes its weights; what is left out is as in `[trainer]`."""
    critic: CriticConfig | None = None
    """Its critic, with an algorithm that needs one; what is left out is as in `[critic]`."""
    teacher: TeacherConfig | None = None
    """Its teacher, with an algorithm that needs one; default: `[teacher]`."""
    engine: AnyEngineConfig = EmbeddedEngineConfig()
    """What makes its tokens; what is left out is as in `[engine]`."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Its own pace; what is left out is as in `[schedule]`."""
    weight_check: WeightCheckConfig = WeightCheckConfig()
    """Its own weight check; what is left out is as in `[weight_check]`."""
    rollout: RolloutConfig = RolloutConfig()
    """Its own `sampling` and `prompts_per_step`; with `data` of its own, everything. What is left
    out is as in `[rollout]`."""
    data: DataConfig | None = None
    """Prompts of its own: it then plays episodes alone, and takes no part in the shared ones."""
    reward: RewardConfig | None = None
    """With `data` of its own: what its answers are worth; default: `[reward]`."""


POLICY_BLOCKS = tuple(name for name in PolicyConfig.model_fields if name != "learns")
INHERITED = tuple(name for name in POLICY_BLOCKS if name not in ("data", "reward", "teacher"))

Tables = dict[str, Any]


def inherit_blocks(tables: Tables) -> None:
    """Fill the blocks of each policy from the top of the file, in place.

    Without `[model]` the top takes the first one that a policy names.
    """
    policies = tables.get("policies")
    if not isinstance(policies, dict) or not policies:
        return
    for name, own in policies.items():
        if isinstance(own, dict):
            policies[name] = {**own, **_inherited(tables, own)}
    models = [own["model"] for own in policies.values() if isinstance(own, dict) and "model" in own]
    if "model" not in tables and models:
        tables["model"] = dict(models[0]) if isinstance(models[0], dict) else models[0]


def _inherited(tables: Tables, own: Mapping[str, Any]) -> Tables:
    found: Tables = {}
    for block in INHERITED:
        above, mine = tables.get(block), own.get(block)
        if isinstance(above, dict) and isinstance(mine, dict):
            is_other = "kind" in mine and mine["kind"] != above.get("kind", mine["kind"])
            found[block] = dict(mine) if is_other else merged(above, mine)
        elif isinstance(above, dict) and mine is None:
            found[block] = merged(above, {})
    if own.get("learns") is False:
        found.pop("critic", None)
    return found


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tables:
    """Both tables in one, table by table; what `above` says counts."""
    result: Tables = {k: merged(v, {}) if isinstance(v, dict) else v for k, v in below.items()}
    for key, value in above.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, Mapping)
        result[key] = merged(old, value) if both and isinstance(old, dict) else value
    return result
