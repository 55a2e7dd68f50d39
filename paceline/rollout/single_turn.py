"""The simplest environment, and loading one of the user's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from paceline.errors import ConfigError
from paceline.rollout.env import Actor, Env, Outcome
from paceline.rollout.rewards import Reward
from paceline.types import Prompt
from paceline.user_code import NOT_OF_USER_CODE, failure_text, load_callable

SINGLE_TURN = "single_turn"


class SingleTurn:
    """Asks once and scores the answer, if there is a reward."""

    def __init__(self, reward: Reward | None) -> None:
        self._reward = reward

    async def __call__(self, prompt: Prompt, actors: Mapping[str, Actor]) -> Outcome:
        role, actor = next(iter(actors.items()))
        reply = await actor(prompt)
        if reply.finish == "abort":
            return Outcome({role: None}, cause="engine/abort")
        if self._reward is None:
            return Outcome({role: None}, is_scored=False)
        score = await self._reward.score(
            prompt, reply.text, finish=reply.finish, num_tokens=reply.num_tokens
        )
        return Outcome({role: score.value}, {role: score.parts}, cause=score.reason)


def load_env(
    name: str, *, base: Path = Path(), reward: Reward | None = None, needs_reward: bool = True
) -> Env:
    """`single_turn`, or the user's `module:name` or `file.py:name` relative to `base`.

    The user's is an async function of (prompt, actors), an object that is called so, or a class,
    of which one object is made without values. One that declares a parameter `reward` is given the
    run's `Reward`. needs_reward: False if nothing is learned from rewards, so that answers may go
    without. Raises ConfigError, also if it can not be imported, is not async or takes other values.
    """
    if name == SINGLE_TURN:
        if reward is None and needs_reward:
            raise ConfigError("env = 'single_turn' needs a reward: see [reward]")
        return SingleTurn(reward)
    try:
        env = load_callable(name, base)
    except (ConfigError, *NOT_OF_USER_CODE):
        raise
    # The user's code may raise anything, also by `sys.exit`.
    except BaseException as exc:
        raise ConfigError(f"env = {name!r} can not be loaded: {failure_text(exc)}") from exc
    if _is_plainly_sync(env):
        raise ConfigError(
            f"env = {name!r} is not async: write `async def`, since it awaits its actors"
        )
    wants_reward = _check_parameters(env, name)
    if wants_reward and reward is None:
        raise ConfigError(f"env = {name!r} asks for a reward: see [reward]")
    return cast(Env, functools.partial(env, reward=reward) if wants_reward else env)


def _is_plainly_sync(env: Callable[..., Any]) -> bool:
    """True if the user wrote `def` for the function. What a decorator made may be either."""
    function = env if inspect.isfunction(env) else inspect.getattr_static(type(env), "__call__")
    if not inspect.isfunction(function) or "<locals>" in function.__qualname__:
        return False
    return not inspect.iscoroutinefunction(function) and not hasattr(function, "__wrapped__")


def _check_parameters(env: Callable[..., Any], name: str) -> bool:
    """Whether it wants the reward. Raises ConfigError if it can not be called as we call it."""
    try:
        signature = inspect.signature(env)
    except (TypeError, ValueError):  # not to be seen; the call will show
        return False
    wants_reward = "reward" in signature.parameters
    try:
        signature.bind(None, None, **({"reward": None} if wants_reward else {}))
    except TypeError as exc:
        raise ConfigError(
            f"env = {name!r} takes {signature}, and is called with (prompt, actors), or with "
            f"(prompt, actors, reward) if it declares `reward`: {exc}"
        ) from exc
    return wants_reward
