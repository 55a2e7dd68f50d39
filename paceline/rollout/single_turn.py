"""The simplest environment, and loading one of the user's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from paceline.errors import ConfigError
from paceline.rollout.env import Actor, Env, Outcome
from paceline.rollout.rewards import Reward
from paceline.rollout.score import to_score
from paceline.types import Prompt
from paceline.user_code import load_callable

SINGLE_TURN = "single_turn"


class SingleTurn:
    """Asks once and scores the answer."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward

    async def __call__(self, prompt: Prompt, actors: Mapping[str, Actor]) -> Outcome:
        role, actor = next(iter(actors.items()))
        reply = await actor(prompt)
        if reply.finish == "abort":
            return Outcome({role: None}, cause="engine/abort")
        score = await self._reward.score(
            prompt, reply.text, finish=reply.finish, num_tokens=reply.num_tokens
        )
        return Outcome({role: score.value}, {role: score.parts}, cause=score.reason)


def load_env(name: str, *, base: Path = Path(), reward: Reward | None = None) -> Env:
    """`single_turn`, or the user's `module:name` or `file.py:name` relative to `base`.

    A function or object that declares a parameter `reward` is given the run's `Reward`. Raises
    ConfigError.
    """
    if name == SINGLE_TURN:
        if reward is None:
            raise ConfigError("env = 'single_turn' needs a reward: see [reward]")
        return SingleTurn(reward)
    env = load_callable(name, base)
    wants_reward = "reward" in inspect.signature(env).parameters
    if wants_reward and reward is None:
        raise ConfigError(f"env = {name!r} asks for a reward: see [reward]")
    return cast(Env, functools.partial(env, reward=reward) if wants_reward else env)


def to_outcome(result: Any, roles: Sequence[str]) -> Outcome:
    """What an environment returned, as an Outcome.

    A mapping by role gives each role its reward; any other result is scored as a reward
    function's and goes to every role. Raises TypeError for what can not be read.
    """
    if isinstance(result, Outcome):
        return result
    if isinstance(result, Mapping) and result and set(result) <= set(roles):
        scores = {role: to_score(value, {}) for role, value in result.items()}
    else:
        scores = dict.fromkeys(roles, to_score(result, {}))
    failed = [score for score in scores.values() if score.value is None]
    return Outcome(
        rewards={role: score.value for role, score in scores.items()},
        parts={role: score.parts for role, score in scores.items()},
        cause=failed[0].reason if failed else None,
    )
