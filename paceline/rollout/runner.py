"""Plays episodes: prompts in, groups of scored samples out.

    draws --> one task per episode --> env <--> actors <--> engine
                                        '--> reward --> Group

All episodes of a call start at once and in order, so that the engine sees every request before
its first step. A failing episode is a sample with a status and a cause; a broken engine ends the
whole call with the engine's own exception.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.deadline import stop
from paceline.engines.base import Engine, Sampling
from paceline.errors import EngineError, PacelineError
from paceline.rollout.actor import RecordingActor, Seat
from paceline.rollout.env import Env, Outcome
from paceline.rollout.outcomes import failed_outcome, to_outcome
from paceline.rollout.renderer import Renderer
from paceline.rollout.rewards import Reward
from paceline.rollout.score import exception_score
from paceline.rollout.settings import RolloutConfig
from paceline.types import Draw, Episode, Group, Sample, Status, derive_seed
from paceline.user_code import NOT_OF_USER_CODE

logger = logging.getLogger(__name__)
T = TypeVar("T")

CANCEL_TIMEOUT_S = 30.0
"""For environments to end once they are cancelled."""
ORIGINS = ("engine", "env", "reward")
"""A cause is `<origin>/<word>`."""


@dataclass(slots=True)
class _Place:
    """Where an episode belongs, and which attempt at it this is."""

    draw: Draw
    index: int
    attempt: int = 0


class Runner:
    """Runs episodes of one environment against the engine of one policy.

    samples_per_prompt, sampling: those of `config` unless given (evals have their own). purpose:
    keeps the seeds of training ("sample") and of each eval apart.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        env: Env,
        reward: Reward | None,
        config: RolloutConfig,
        *,
        policy: str,
        run_seed: int,
        samples_per_prompt: int | None = None,
        sampling: Sampling | None = None,
        purpose: str = "sample",
    ) -> None:
        self.config = config
        self.policy = policy
        self.reward = reward
        self.samples_per_prompt = samples_per_prompt or config.samples_per_prompt
        self.sampling = sampling or config.sampling
        self._engine = engine
        self._renderer = renderer
        self._env = env
        self._run_seed = run_seed
        self._purpose = purpose

    async def collect(
        self,
        draws: Sequence[Draw],
        *,
        step: int,
        samples_per_prompt: int | None = None,
        sampling: Sampling | None = None,
    ) -> list[Group]:
        """One group a draw, in order, with all its episodes, failed ones included.

        Raises the engine's own exception if the engine broke or could serve no episode at all.
        Cancelling the call cancels every episode.
        """
        count = samples_per_prompt or self.samples_per_prompt
        seat = Seat(self.policy, self._engine, self._renderer, sampling or self.sampling)
        places = [_Place(draw, index) for draw in draws for index in range(count)]
        played = await _run_all([self._play(place, seat) for place in places])
        for attempt in range(1, self.config.episode_retries + 1):
            again = [i for i, (episode, _) in enumerate(played) if _is_unserved(episode)]
            if not again:
                break
            logger.warning("step %d: %d episodes not served, playing again", step, len(again))
            retried = [_Place(places[i].draw, places[i].index, attempt) for i in again]
            results = await _run_all([self._play(place, seat) for place in retried])
            for i, result in zip(again, results, strict=True):
                played[i] = result
        refusals = [refusal for _, refusal in played if refusal is not None]
        if refusals and len(refusals) == len(played):
            raise refusals[0]
        episodes = [episode for episode, _ in played]
        return [
            Group(draw.prompt, episodes[i * count : (i + 1) * count], draw.ordinal)
            for i, draw in enumerate(draws)
        ]

    async def _play(self, place: _Place, seat: Seat) -> tuple[Episode, EngineError | None]:
        """One episode, and the engine's refusal if it was not served."""
        draw = place.draw
        retry = ("retry", place.attempt) if place.attempt else ()
        keys = (self.policy, self._purpose, draw.ordinal, draw.prompt.id, place.index, *retry)

        def seed(turn: int) -> int:
            return derive_seed(self._run_seed, *keys, *((turn,) if turn else ()))

        actor = RecordingActor(self.policy, seat, draw, episode=place.index, seed=seed)
        outcome = await self._outcome(draw, actor)
        samples = [_settle(sample, outcome) for sample in actor.samples()]
        episode = Episode(draw.prompt.id, place.index, samples, dict(outcome.metrics))
        return episode, actor.refusal

    async def _outcome(self, draw: Draw, actor: RecordingActor) -> Outcome:
        """What the environment says; a failure of it, or of the engine, is an outcome too."""
        limit = asyncio.timeout(self.config.episode_timeout_s)
        failure: BaseException | None = None
        outcome = Outcome({})
        try:
            async with limit:
                result: Any = self._env(draw.prompt, {actor.role: actor})
                if inspect.isawaitable(result):
                    outcome = to_outcome(await result, (actor.role,))
                else:
                    kind = type(result).__name__
                    detail = f"the environment gave a {kind}, nothing to await: write `async def`"
                    outcome = failed_outcome("env/not_async", detail)
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            failure = exc
        except NOT_OF_USER_CODE:
            raise
        # The user's code may raise anything, also by `sys.exit`; the runner must outlive it.
        except BaseException as exc:
            failure = exc
        if actor.fatal is not None:
            raise actor.fatal
        if actor.refusal is not None:
            return failed_outcome("engine/refused", str(actor.refusal))
        if failure is None:
            return outcome
        if limit.expired():
            limit_s = self.config.episode_timeout_s
            return failed_outcome("env/timeout", f"not done after {limit_s:g} s")
        if isinstance(failure, PacelineError):
            raise failure
        score = exception_score(failure, frozenset({__file__}), 0.0)
        return failed_outcome(f"env/{score.cause}", score.detail)


def _settle(sample: Sample, outcome: Outcome) -> Sample:
    """Give a sample its reward, or the status and cause that stand in for one."""
    sample.reward_parts = dict(outcome.parts.get(sample.role, {}))
    if sample.status is Status.ABORTED:
        return sample
    status = outcome.status.get(sample.role, outcome.status.get("*"))
    reward = outcome.rewards.get(sample.role)
    if status is not None:
        sample.status = status
    if not sample.status.is_trainable:
        sample.cause, sample.detail = _split_cause(outcome.cause or f"env/{sample.status}")
    elif reward is None and not outcome.is_scored:
        _check_columns(sample)
    elif reward is None:
        sample.status = Status.UNSCORED
        sample.cause, sample.detail = _split_cause(outcome.cause or _no_reward(sample.role))
    elif not math.isfinite(reward):
        sample.status = Status.UNSCORED
        sample.cause, sample.detail = "env/nan" if math.isnan(reward) else "env/inf", ""
    else:
        sample.reward = float(reward)
        _check_columns(sample)
    return sample


def _no_reward(role: str) -> str:
    return f"env/none: the environment gave no reward for the role {role!r}"


def _check_columns(sample: Sample) -> None:
    try:
        sample.validate()
    except ValueError as exc:
        sample.status, sample.reward = Status.FAILED, None
        sample.cause, sample.detail = "engine/invalid", str(exc)


def _split_cause(text: str) -> tuple[str, str]:
    """`reward/timeout: no result` -> (`reward/timeout`, `no result`)."""
    word, _, detail = text.partition(": ")
    if word.partition("/")[0] in ORIGINS and "/" in word:
        return word, detail
    return "env/unscored", text


def _is_unserved(episode: Episode) -> bool:
    return any((sample.cause or "").startswith("engine/") for sample in episode.samples)


async def _run_all(episodes: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. The first exception, or a cancellation, cancels the others and waits for
    them before it goes on."""
    tasks = [asyncio.create_task(episode) for episode in episodes]
    if not tasks:
        return []
    try:
        # ends: each episode with the engine's answer or failure, or by `episode_timeout_s`
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task in done and (task.cancelled() or task.exception() is not None):
                task.result()
        return [task.result() for task in tasks]
    finally:
        await stop(*tasks, grace_s=CANCEL_TIMEOUT_S)
