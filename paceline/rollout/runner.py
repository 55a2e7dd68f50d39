"""Plays episodes: prompts in, groups of scored samples out.

    draws --> one task per episode --> env <--> an actor for each role <--> engines
                                        '--> rewards by role --> Group

All episodes of a call start at once and in order, so that an engine sees every first request
before its first step. A failing episode is a sample with a status and a cause; a broken engine ends
the whole call with the engine's own exception.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard, TypeVar

from paceline.deadline import stop
from paceline.engines.base import CutSignal, Engine, Sampling
from paceline.errors import ConfigError, EngineError, PacelineError, RolloutError
from paceline.rollout.actor import RecordingActor, Seat
from paceline.rollout.award import award, award_other, has_failed
from paceline.rollout.env import Env, Outcome
from paceline.rollout.outcomes import failed_outcome, to_outcome
from paceline.rollout.renderer import Renderer
from paceline.rollout.rewards import Reward
from paceline.rollout.score import exception_score
from paceline.rollout.seats import AnySeat, FrozenSeat, Player, learning_policies, seat_for
from paceline.rollout.settings import RolloutConfig
from paceline.types import Draw, Episode, Group, Sample, derive_seed
from paceline.user_code import NOT_OF_USER_CODE

logger = logging.getLogger(__name__)
T = TypeVar("T")

CANCEL_TIMEOUT_S = 30.0
"""For environments to end once they are cancelled."""


@dataclass(slots=True)
class _Place:
    """Where an episode belongs, and which attempt at it this is."""

    draw: Draw
    index: int
    cut: CutSignal
    attempt: int = 0


class Runner:
    """Plays episodes of one environment with the seats of its roles.

    policy: whose batches these are; default: that of the first role that learns.
    samples_per_prompt: that of `config` unless given (evals have their own). purpose: keeps the
    seeds of training ("sample") and of each eval apart. Raises ConfigError if no role learns.
    """

    def __init__(
        self,
        seats: Mapping[str, AnySeat],
        env: Env,
        reward: Reward | None,
        config: RolloutConfig,
        *,
        run_seed: int,
        policy: str | None = None,
        samples_per_prompt: int | None = None,
        purpose: str = "sample",
    ) -> None:
        policies = list(dict.fromkeys(learning_policies(seats).values()))
        if not policies:
            raise ConfigError(f"none of the roles {', '.join(seats)} is played by one that learns")
        self.config = config
        self.policies = policies
        """Those that have samples in the groups."""
        self.policy = policy or policies[0]
        self.reward = reward
        self.samples_per_prompt = samples_per_prompt or config.samples_per_prompt
        self._seats = dict(seats)
        self._env = env
        self._run_seed = run_seed
        self._purpose = purpose
        self._cuts: dict[int, CutSignal] = {}
        self._actors: dict[int, list[RecordingActor]] = {}
        """By draw: whoever speaks, or has spoken, in what is being collected."""

    @classmethod
    def single(
        cls,
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
    ) -> Runner:
        """One policy, in the role of its own name. sampling: that of `config` unless given."""
        return cls(
            {policy: Seat(policy, engine, renderer, sampling or config.sampling)},
            env,
            reward,
            config,
            run_seed=run_seed,
            samples_per_prompt=samples_per_prompt,
            purpose=purpose,
        )

    async def collect(
        self,
        draws: Sequence[Draw],
        *,
        step: int,
        samples_per_prompt: int | None = None,
        sampling: Sampling | None = None,
    ) -> list[Group]:
        """One group a draw, in order, with all its episodes, failed ones included.

        sampling: of the roles that learn. Raises the engine's own exception if an engine broke or
        could serve no episode at all. Cancelling the call cancels every episode.
        """
        count = samples_per_prompt or self.samples_per_prompt
        seats = self._seats if sampling is None else _with_sampling(self._seats, sampling)
        cuts = {draw.ordinal: CutSignal() for draw in draws}
        places = [_Place(draw, i, cuts[draw.ordinal]) for draw in draws for i in range(count)]
        self._cuts |= cuts
        self._actors |= {ordinal: [] for ordinal in cuts}
        try:
            episodes = await self._play_all(places, seats, step)
        finally:
            for ordinal in cuts:
                del self._cuts[ordinal]
                del self._actors[ordinal]
        return [
            Group(draw.prompt, episodes[i * count : (i + 1) * count], draw.ordinal)
            for i, draw in enumerate(draws)
        ]

    def cut_short(self, draw: Draw) -> bool:
        """End the answers of a draw that is being collected; False if it is not.

        Answers under way keep their tokens and count as truncated, those that follow are empty;
        the environment goes on and gives its rewards.
        """
        cut = self._cuts.get(draw.ordinal)
        if cut is not None:
            cut.set()
        return cut is not None

    def tokens_under_way(self) -> dict[str, int]:
        """Policy -> tokens that it has sampled for draws that are still being collected."""
        found = dict.fromkeys(self.policies, 0)
        for actor in (actor for actors in self._actors.values() for actor in actors):
            if actor.learns:
                found[actor.seat.policy] += actor.num_sampled
        return found

    async def _play_all(
        self, places: Sequence[_Place], seats: Mapping[str, AnySeat], step: int
    ) -> list[Episode]:
        played = await self._play_at_once(places, seats)
        for attempt in range(1, self.config.episode_retries + 1):
            again = [i for i, (episode, _) in enumerate(played) if _is_unserved(episode)]
            if not again:
                break
            logger.warning(
                "step %d: %d episodes not served (%s), playing again",
                step, len(again), _refusal(played[again[0]][0]),
            )  # fmt: skip
            retried = [replace(places[i], attempt=attempt) for i in again]
            results = await self._play_at_once(retried, seats)
            for i, result in zip(again, results, strict=True):
                played[i] = result
        refusals = [refusal for _, refusal in played if refusal is not None]
        if refusals and len(refusals) == len(played):
            raise refusals[0]
        return [episode for episode, _ in played]

    async def _play_at_once(
        self, places: Sequence[_Place], seats: Mapping[str, AnySeat]
    ) -> list[tuple[Episode, EngineError | None]]:
        limit_s = self.config.episode_timeout_s
        if limit_s is not None:
            limit_s += CANCEL_TIMEOUT_S
        return await _run_all([self._play(place, seats) for place in places], limit_s)

    async def _play(
        self, place: _Place, seats: Mapping[str, AnySeat]
    ) -> tuple[Episode, EngineError | None]:
        """One episode, and the engine's refusal if it was not served."""
        actors = {role: self._actor(place, role, seat) for role, seat in seats.items()}
        outcome = await self._outcome(place.draw, actors)
        refusals = (actor.refusal for actor in actors.values() if actor.refusal is not None)
        return _episode(place, actors, outcome), next(refusals, None)

    def _actor(self, place: _Place, role: str, seat: AnySeat) -> Player:
        """Seeds depend on names and places, never on the order of roles or of calls."""
        draw = place.draw
        where = (self._purpose, draw.ordinal, draw.prompt.id, place.index)
        player: Seat | FrozenSeat
        if isinstance(seat, Seat):  # so nobody is picked; the runner plays thousands of episodes
            player = seat
        else:
            player = seat_for(seat, derive_seed(self._run_seed, "pick", role, *where))
        retry = ("retry", place.attempt) if place.attempt else ()
        of_role = () if role == player.policy else ("role", role)
        seed = partial(self._turn_seed, (player.policy, *where, *retry, *of_role))
        actor = player.actor(role, draw, episode=place.index, seed=seed, cut=place.cut)
        if isinstance(actor, RecordingActor):
            self._actors[draw.ordinal].append(actor)
        return actor

    def _turn_seed(self, keys: tuple[str | int, ...], turn: int) -> int:
        return derive_seed(self._run_seed, *keys, *((turn,) if turn else ()))

    async def _outcome(self, draw: Draw, actors: Mapping[str, Player]) -> Outcome:
        """What the environment says; a failure of it, or of an engine, is an outcome too."""
        limit = asyncio.timeout(self.config.episode_timeout_s)
        failure: BaseException | None = None
        outcome = Outcome({})
        try:
            async with limit:
                result: Any = self._env(draw.prompt, dict(actors))
                if inspect.isawaitable(result):
                    outcome = to_outcome(await result, tuple(actors))
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
        unserved = _unserved_outcome(actors)
        if unserved is not None:
            return unserved
        if failure is None:
            return outcome
        if limit.expired():
            limit_s = self.config.episode_timeout_s
            return failed_outcome("env/timeout", f"not done after {limit_s:g} s")
        if isinstance(failure, PacelineError):
            raise failure
        score = exception_score(failure, frozenset({__file__}), 0.0)
        return failed_outcome(f"env/{score.cause}", score.detail)


def _with_sampling(seats: Mapping[str, AnySeat], sampling: Sampling) -> dict[str, AnySeat]:
    learning = learning_policies(seats)
    return {
        role: replace(seat, sampling=sampling)
        if isinstance(seat, Seat) and role in learning
        else seat
        for role, seat in seats.items()
    }


def _unserved_outcome(actors: Mapping[str, Player]) -> Outcome | None:
    """The failure of an episode that some engine did not serve. A broken engine's is raised.

    An abort is told here only for roles that do not learn: the others' samples hold it themselves.
    """
    for actor in actors.values():
        if actor.fatal is not None:
            raise actor.fatal
    for role, actor in actors.items():
        where = f"role {role!r}: " if len(actors) > 1 else ""
        if actor.refusal is not None:
            return failed_outcome("engine/refused", f"{where}{actor.refusal}")
        if actor.abort is not None and not _learns(actor):
            return failed_outcome("engine/abort", f"{where}{actor.abort}")
    return None


def _episode(place: _Place, actors: Mapping[str, Player], outcome: Outcome) -> Episode:
    """What the roles said. One that was silent among several took no part: it has no sample,
    unless there is nobody else to tell that the episode failed."""
    is_alone = len(actors) == 1
    samples: list[Sample] = []
    others: list[Sample] = []
    for actor in actors.values():
        if not _learns(actor):
            others += actor.answers()
        else:
            samples += actor.samples() if is_alone else actor.answers()
    if not samples and not is_alone and has_failed(outcome):
        samples = [actor.blank() for actor in actors.values() if _learns(actor)]
    return Episode(
        place.draw.prompt.id,
        place.index,
        [award(sample, outcome) for sample in samples],
        dict(outcome.metrics),
        [award_other(sample, outcome) for sample in others],
    )


def _learns(actor: Player) -> TypeGuard[RecordingActor]:
    return isinstance(actor, RecordingActor) and actor.learns


def _refusal(episode: Episode) -> str:
    """What the engine said of the first sample that it did not serve."""
    samples = (*episode.samples, *episode.others)
    refused = next((s for s in samples if (s.cause or "").startswith("engine/")), None)
    return "for an unknown reason" if refused is None else f"{refused.cause}: {refused.detail}"


def _is_unserved(episode: Episode) -> bool:
    return any((sample.cause or "").startswith("engine/") for sample in episode.samples)


async def _run_all(
    episodes: Sequence[Coroutine[Any, Any, T]], limit_s: float | None = None
) -> list[T]:
    """Results in order. The first exception, or a cancellation, cancels the others and waits for
    them before it goes on.

    limit_s: by when every episode has ended that can be ended. Raises RolloutError if one has not.
    """
    tasks = [asyncio.create_task(episode) for episode in episodes]
    if not tasks:
        return []
    try:
        # Without a limit each episode ends with the engine's answers or failure.
        done, late = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task in done and (task.cancelled() or task.exception() is not None):
                task.result()
        if late:
            raise RolloutError(
                f"{len(late)} of {len(tasks)} episodes went on for {CANCEL_TIMEOUT_S:g} s after "
                "rollout.episode_timeout_s had ended them: the environment catches "
                "asyncio.CancelledError and must let it through"
            )
        return [task.result() for task in tasks]
    finally:
        await stop(*tasks, grace_s=CANCEL_TIMEOUT_S)
