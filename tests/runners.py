"""A runner over fakes, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rollout_fakes import (
    FakeReward,
    ScriptedEngine,
    draws,
    renderer,
)

from paceline.rollout.env import Actor
from paceline.rollout.runner import Runner
from paceline.rollout.settings import RolloutConfig
from paceline.rollout.single_turn import SingleTurn
from paceline.types import Group

Actors = Mapping[str, Actor]


def make(
    engine: ScriptedEngine,
    *,
    env: Any = None,
    reward: FakeReward | None = None,
    template: str | None = None,
    run_seed: int = 0,
    policy: str = "policy",
    purpose: str = "sample",
    **config: Any,
) -> Runner:
    reward = reward or FakeReward(lambda prompt, completion: 1.0)
    fields = {"samples_per_prompt": 2, **config}
    return Runner.single(
        engine,
        renderer(template),
        env or SingleTurn(reward),  # type: ignore[arg-type]
        reward,  # type: ignore[arg-type]
        RolloutConfig(**fields),
        policy=policy,
        run_seed=run_seed,
        purpose=purpose,
    )


def collect(runner: Runner, *texts: str, **options: Any) -> list[Group]:
    return asyncio.run(runner.collect(draws(*texts), step=1, **options))


def statuses(groups: list[Group]) -> list[tuple[str, str | None]]:
    return [(s.status.value, s.cause) for group in groups for s in group.samples()]
