"""One eval set measured once: every prompt answered, every answer scored, numbers at the end.

An answer that could not be scored is counted by its cause and, unless `reward.on_failure` says
otherwise, left out of every mean. If nothing could be scored, or anything raises, the result has a
reason in place of numbers.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from paceline.algorithms.advantages import episode_reward
from paceline.deadline import bounded, reason_of
from paceline.errors import ConfigError, RolloutError
from paceline.evals.estimates import Estimate, estimate, pass_at_k
from paceline.evals_settings import EvalSet
from paceline.observe.metrics import Metrics
from paceline.rollout.filters import settle_failures
from paceline.rollout.settings import OnFailure
from paceline.types import Draw, Episode, Group, Prompt, Status

REWARD_ROUNDING = 1e-9
"""A weighted sum of parts that should reach the pass threshold may miss it by this much."""


class EvalRunner(Protocol):
    """Collects the answers of one eval set, with the set's sampling, reward and answer count."""

    async def collect(self, draws: Sequence[Draw], *, step: int) -> list[Group]:
        """Groups of the draws, in their order. Draws that failed may be absent."""


@dataclass(frozen=True, slots=True)
class PreparedSet:
    """An eval set with its prompts loaded, and what collects its answers."""

    settings: EvalSet
    prompts: Sequence[Prompt]
    runner: EvalRunner
    on_failure: OnFailure = "drop_sample"
    """What an answer whose reward failed means, as in training; `fail` skips the point."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """One set at one step: numbers, or the reason why there are none.

    Example: EvalResult("heldout", step=20, version=20, skipped="busy").
    """

    name: str
    step: int
    version: int
    """Of the weights that were measured."""
    skipped: str | None = None
    """Why there are no numbers; None if there are."""
    reward: Estimate | None = None
    """Mean over prompts of the mean reward of a prompt's answers."""
    roles: dict[str, float] = field(default_factory=dict)
    """Role -> the same mean of its own rewards, where the environment has several roles."""
    pass_at: dict[int, Estimate] = field(default_factory=dict)
    num_prompts: int = 0
    """Prompts with a scored answer."""
    num_samples: int = 0
    """Scored answers."""
    truncated: float = 0.0
    """Share of the scored answers that ended at the token limit."""
    mean_tokens: float = 0.0
    """Tokens that the policy made, per scored answer."""
    failures: dict[str, int] = field(default_factory=dict)
    """Cause -> answers that could not be scored, also where they count with reward 0."""
    duration_s: float = 0.0
    groups: list[Group] = field(default_factory=list)

    def metrics(self) -> Metrics:
        """`eval/<name>/...` and `time/eval/<name>`."""
        metrics = Metrics()
        area = f"eval/{self.name}"
        metrics.sum(f"time/{area}", self.duration_s)
        metrics.sum(f"{area}/skipped", self.skipped is not None)
        if self.reward is None:
            return metrics
        metrics.sum(f"{area}/prompts", self.num_prompts)
        metrics.sum(f"{area}/samples", self.num_samples)
        metrics.sum(f"{area}/failed_samples", sum(self.failures.values()))
        metrics.mean(f"{area}/truncated", self.truncated)
        metrics.mean(f"{area}/num_tokens", self.mean_tokens)
        for role, value in self.roles.items():
            metrics.mean(f"{area}/role/{role.replace('/', '.')}/reward", value)
        shown = {"reward": self.reward} | {f"pass_at_{k}": e for k, e in self.pass_at.items()}
        for name, found in shown.items():
            metrics.mean(f"{area}/{name}", found.value)
            if found.low is not None and found.high is not None:
                metrics.mean(f"{area}/{name}/low", found.low)
                metrics.mean(f"{area}/{name}/high", found.high)
        return metrics


async def run_evals(
    sets: Sequence[PreparedSet], *, policy: str, step: int, version: int, timeout_s: float
) -> list[EvalResult]:
    """One set after the other; a set that fails does not keep the next from running."""
    return [
        await run_eval(prepared, policy=policy, step=step, version=version, timeout_s=timeout_s)
        for prepared in sets
    ]


async def run_eval(
    prepared: PreparedSet, *, policy: str, step: int, version: int, timeout_s: float
) -> EvalResult:
    """Measure one set. Raises nothing but cancellation: a failure is a skipped result.

    The draws are the same at every step, and so are the seeds made of them: two steps differ by
    their weights alone.
    """
    settings = prepared.settings
    prompts = prepared.prompts[: settings.limit]
    draws = [Draw(ordinal=i, epoch=0, prompt=prompt) for i, prompt in enumerate(prompts)]
    start_s = time.monotonic()
    try:
        if not draws:
            raise ConfigError(f"eval set {settings.name!r} has no prompts")
        groups = await bounded(prepared.runner.collect(draws, step=step), timeout_s)
        num_missing = (len(draws) - len(groups)) * settings.samples_per_prompt
        result = summarise(
            prepared, groups, policy=policy, step=step, version=version, num_missing=num_missing
        )
    except Exception as exc:
        result = EvalResult(settings.name, step, version, skipped=reason_of(exc))
    return replace(result, duration_s=time.monotonic() - start_s)


@dataclass(slots=True)
class _Answer:
    reward: float
    is_truncated: bool
    num_tokens: int


def summarise(
    prepared: PreparedSet,
    groups: Sequence[Group],
    *,
    policy: str,
    step: int,
    version: int,
    num_missing: int = 0,
) -> EvalResult:
    """Numbers of the collected groups, of the set's policy or the one given.

    num_missing: answers of draws that left no group. Raises RolloutError, with the causes, if no
    answer at all could be scored, and what `settle_failures` raises.
    """
    settings = prepared.settings
    policy = settings.policy or policy
    failures = Counter({"missing": num_missing} if num_missing else {})
    by_prompt: list[list[_Answer]] = []
    counted: list[Group] = []
    for group in groups:
        failures.update(_causes(group))
        is_dropped = settle_failures(group, prepared.on_failure) is not None
        answers = [_read_answer(e, policy) for e in group.episodes if e.is_trainable]
        scored = [answer for answer in answers if answer is not None]
        if scored and not is_dropped:
            by_prompt.append(scored)
            counted.append(group)
    every = [answer for answers in by_prompt for answer in answers]
    if not every:
        raise RolloutError(_nothing_scored(settings.name, groups, failures))
    means = [statistics.fmean(answer.reward for answer in answers) for answers in by_prompt]
    return EvalResult(
        name=settings.name,
        step=step,
        version=version,
        reward=estimate(means),
        roles=_by_role(counted),
        pass_at=_pass_at(settings, by_prompt),
        num_prompts=len(by_prompt),
        num_samples=len(every),
        truncated=statistics.fmean(answer.is_truncated for answer in every),
        mean_tokens=statistics.fmean(answer.num_tokens for answer in every),
        failures=dict(sorted(failures.items())),
        groups=list(groups),
    )


def _nothing_scored(name: str, groups: Sequence[Group], failures: Counter[str]) -> str:
    counts = ", ".join(f"{count} {cause}" for cause, count in failures.most_common())
    samples = (sample for group in groups for sample in group.samples())
    first = next((sample for sample in samples if sample.cause and sample.detail), None)
    detail = f"; the first: {first.cause}: {first.detail}" if first is not None else ""
    return f"no answer of eval set {name!r} was scored: {counts}{detail}"


def _causes(group: Group) -> Iterator[str]:
    """Why each failed answer failed."""
    for episode in group.episodes:
        broken = next((s for s in episode.samples if not s.status.is_trainable), None)
        if broken is not None:
            yield broken.cause or broken.status.value
        elif not episode.samples:
            yield "missing"


def _read_answer(episode: Episode, policy: str) -> _Answer | None:
    """What an episode came to for the policy; None if it took no part."""
    samples = [sample for sample in episode.samples if sample.policy == policy]
    if not samples:
        return None
    roles = sorted({sample.role for sample in samples})
    rewards = [episode_reward(episode, policy, role) for role in roles]
    return _Answer(
        reward=statistics.fmean(reward for reward in rewards if reward is not None),
        is_truncated=any(sample.status is Status.TRUNCATED for sample in samples),
        num_tokens=sum(version >= 0 for sample in samples for version in sample.versions),
    )


def _by_role(groups: Sequence[Group]) -> dict[str, float]:
    """Mean over prompts of each role's mean reward; nothing where there is one role alone."""
    by_prompt: dict[str, list[float]] = {}
    for group in groups:
        rewards: dict[str, list[float]] = {}
        for episode in (episode for episode in group.episodes if episode.is_trainable):
            of_role = {s.role: s.reward for s in [*episode.samples, *episode.others]}
            for role, reward in of_role.items():
                if reward is not None:
                    rewards.setdefault(role, []).append(reward)
        for role, found in rewards.items():
            by_prompt.setdefault(role, []).append(statistics.fmean(found))
    if len(by_prompt) < 2:
        return {}
    return {role: statistics.fmean(found) for role, found in sorted(by_prompt.items())}


def _pass_at(settings: EvalSet, by_prompt: list[list[_Answer]]) -> dict[int, Estimate]:
    """Per k over the prompts that have at least k scored answers; k without any is left out."""
    threshold = settings.pass_threshold - REWARD_ROUNDING
    found = {}
    for k in settings.pass_at:
        values = [
            pass_at_k(len(answers), sum(a.reward >= threshold for a in answers), k)
            for answers in by_prompt
            if len(answers) >= k
        ]
        if values:
            found[k] = estimate(values, is_share=True)
    return found
