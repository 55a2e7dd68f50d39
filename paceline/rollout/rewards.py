"""Rewards: one answer in, one `Score` out.

    reward = build_reward(config.reward, base=run_file.parent)
    async with reward:
        await reward.start()                       # finds a wrong function before anything runs
        score = await reward.score(prompt, "42")   # a failure is a score with a cause

Functions of the user, and built-ins that can hang, run in worker processes (`workers`).
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import cloudpickle

from paceline.errors import ConfigError, MissingExtraError
from paceline.rollout.score import Score, exception_score, to_score
from paceline.rollout.scorers import INLINE_KINDS, Scorer, ScorerOptions, make_scorer
from paceline.rollout.settings import OnFailure, RewardConfig, RewardPart, ScorerConfig
from paceline.rollout.worker_protocol import (
    REWARD_NAMES,
    BuiltinScorer,
    LocatedScorer,
    PickledScorer,
    ScorerSpec,
)
from paceline.rollout.workers import WorkerPool
from paceline.types import Message, Prompt
from paceline.user_code import read_signature

_EXTRAS = {
    "math_verify": ("math_verify", "math-verify", "math"),
    "reasoning_gym": ("reasoning_gym", "reasoning-gym", "reasoning-gym"),
}
"""kind -> module, package, extra."""


@dataclass(frozen=True, slots=True)
class Part:
    """One term of the weighted sum. Either in place or in a worker."""

    name: str
    """Also its name in the worker pool; empty for a reward of one scorer."""
    weight: float
    inline: Scorer | None = None
    spec: ScorerSpec | None = None


class Reward:
    """The weighted sum of its parts; owns the worker processes they need."""

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        timeout_s: float = 10.0,
        num_workers: int = 2,
        on_failure: OnFailure = "drop_sample",
    ) -> None:
        self.on_failure: OnFailure = on_failure
        self.outside: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered around each call: tells engines that take turns that an answer may follow."""
        self._parts = tuple(parts)
        specs = {part.name: part.spec for part in parts if part.spec is not None}
        self.pool = (
            WorkerPool(specs, num_workers=num_workers, timeout_s=timeout_s) if specs else None
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Load all functions once. Raises ConfigError if one can not be found or called."""
        if self.pool is not None:
            await self.pool.start()

    async def aclose(self) -> None:
        """End the worker processes. Idempotent."""
        if self.pool is not None:
            await self.pool.aclose()

    async def score(
        self, prompt: Prompt, completion: str, *, finish: str = "stop", num_tokens: int = 0
    ) -> Score:
        """What the answer is worth. Failures of the reward are scores without a value."""
        answer = (prompt, completion, finish, num_tokens)
        with self.outside():
            if len(self._parts) == 1 and not self._parts[0].name:
                return await self._score_part(self._parts[0], *answer)
            # ends: each part by `timeout_s`
            scores = await asyncio.gather(*(self._score_part(p, *answer) for p in self._parts))
        return _weighted_sum(self._parts, scores)

    async def _score_part(
        self, part: Part, prompt: Prompt, completion: str, finish: str, num_tokens: int
    ) -> Score:
        if part.inline is None:
            assert self.pool is not None
            values = reward_values(prompt, completion, finish, num_tokens)
            return await self.pool.call(part.name, values)
        try:
            result = part.inline(completion, prompt.answer, prompt.metadata)
        except Exception as exc:
            return exception_score(exc, frozenset({__file__}), 0.0)
        return to_score(result, {})


def build_reward(
    config: RewardConfig,
    *,
    base: Path = Path(),
    function: Callable[..., Any] | None = None,
) -> Reward:
    """The reward of a run file's `[reward]`.

    base: folder that files are named relative to. function: a Python callable (also a lambda or
    a closure) that takes the place of `function` and `kind`. Raises ConfigError.
    """
    if function is not None:
        if config.scorers:
            raise ConfigError("a reward function was passed and [reward] names one too")
        parts = [Part("", 1.0, spec=_pickled(function, config.weights))]
    elif config.scorers:
        parts = [_part(scorer, base, config.timeout_s) for scorer in config.scorers]
    else:
        raise ConfigError(
            "[reward] is empty: set reward.function = 'rewards.py:score', or reward.kind, or "
            "[[reward.parts]]"
        )
    return Reward(
        parts,
        timeout_s=config.timeout_s,
        num_workers=config.workers,
        on_failure=config.on_failure,
    )


def reward_values(prompt: Prompt, completion: str, finish: str, num_tokens: int) -> dict[str, Any]:
    """Everything a reward function may ask for, by name."""
    messages = prompt.messages or (Message(role="user", content=prompt.text or ""),)
    values = {
        "completion": completion,
        "prompt": prompt.text if prompt.text is not None else messages[-1]["content"],
        "answer": prompt.answer,
        "metadata": dict(prompt.metadata),
        "messages": list(messages),
        "finish": finish,
        "num_tokens": num_tokens,
    }
    assert tuple(values) == REWARD_NAMES
    return values


def _part(config: ScorerConfig, base: Path, timeout_s: float) -> Part:
    name = config.name if isinstance(config, RewardPart) else ""
    weight = config.weight if isinstance(config, RewardPart) else 1.0
    if config.function is not None:
        spec = LocatedScorer(config.function, str(base.resolve()), dict(config.weights))
        return Part(name, weight, spec=spec)
    assert config.kind is not None
    options = ScorerOptions(
        config.tolerance, config.pattern, config.ignore_case, config.letters, timeout_s
    )
    if config.kind in INLINE_KINDS:
        return Part(name, weight, inline=make_scorer(config.kind, options))
    if config.kind in _EXTRAS:
        module, package, extra = _EXTRAS[config.kind]
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(f"reward kind {config.kind!r}", package, extra)
    return Part(name, weight, spec=BuiltinScorer(config.kind, options))


def _pickled(function: Callable[..., Any], weights: Mapping[str, float]) -> PickledScorer:
    """A callable by value: the worker need not be able to import where it was defined."""
    label = getattr(function, "__qualname__", type(function).__qualname__)
    read_signature(function, REWARD_NAMES, f"reward function {label}")
    code = getattr(function, "__code__", None)
    file = None if code is None else code.co_filename
    try:
        return PickledScorer(_dump_by_value(function), label, dict(weights), file)
    except Exception as exc:
        raise ConfigError(
            f"reward function {label} can not be sent to a worker process: "
            f"{type(exc).__name__}: {exc}. Keep what it needs in a file of its own and name it as "
            "reward.function = 'rewards.py:score'"
        ) from exc


def _dump_by_value(function: Callable[..., Any]) -> bytes:
    """With cloudpickle; by value also where the function is not of `__main__`."""
    name = getattr(function, "__module__", None) or type(function).__module__
    module = sys.modules.get(name)
    known = cloudpickle.list_registry_pickle_by_value()
    if module is None or name == "__main__" or name in known or _is_installed(module):
        return bytes(cloudpickle.dumps(function))
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(function))
    except Exception as exc:
        by_value = exc
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    # A lock or a file beside the function can not travel, but the worker may import the module.
    try:
        return bytes(cloudpickle.dumps(function))
    except Exception:
        raise by_value from None


def _is_installed(module: ModuleType) -> bool:
    """True for built-in modules, the standard library and site-packages."""
    if (file := getattr(module, "__file__", None)) is None:
        return True
    path = Path(file).resolve()
    keys = ("stdlib", "platstdlib", "purelib", "platlib")
    return any(path.is_relative_to(Path(sysconfig.get_path(key)).resolve()) for key in keys)


def _weighted_sum(parts: Sequence[Part], scores: Sequence[Score]) -> Score:
    """Sum of weight * value; failed if a part that weighs anything failed."""
    named: dict[str, float] = {}
    total = 0.0
    for part, score in zip(parts, scores, strict=True):
        named |= {f"{part.name}.{name}": value for name, value in score.parts.items()}
        if score.value is not None:
            named[part.name] = score.value
            total += part.weight * score.value
    seconds = sum(score.seconds for score in scores)
    for part, score in zip(parts, scores, strict=True):
        if score.value is None and part.weight:
            detail = f"part {part.name!r}: {score.detail}"
            return Score(None, named, score.cause, detail, seconds)
    return Score(total, named, seconds=seconds)
