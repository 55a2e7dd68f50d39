"""The answers of a recorded step, scored again by the reward of its run file.

What can not be scored is said in notes: a reward or prompts that were given in Python are not in
the run file, and an environment of the user's own is not played again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.build.parts import Given, Text, load_prompts, make_reward
from paceline.build.recorded import RecordedStep
from paceline.config import RunFile
from paceline.drivers.dispose import Disposer
from paceline.engines.base import Sampling
from paceline.errors import ConfigError, DataError, MissingExtraError
from paceline.observe.regroup import to_sample
from paceline.observe.samples import SampleRecord, prompt_text
from paceline.rollout.filters import shape_overlong
from paceline.rollout.rewards import Reward
from paceline.rollout.score import Score
from paceline.rollout.single_turn import SINGLE_TURN
from paceline.types import Episode, Group, Prompt, Sample


@dataclass(frozen=True, slots=True)
class Rescored:
    """One answer with what it is worth now."""

    record: SampleRecord
    text: str
    """Its tokens, decoded anew."""
    reward: float | None
    """With everything that the run did to it: failures, overlong penalty."""
    cause: str | None = None
    """Why there is no reward."""


@dataclass(frozen=True, slots=True)
class Rescoring:
    """All answers that could be scored, in the order of the file, and what could not be."""

    answers: list[Rescored] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


async def rescore(recorded: RecordedStep, text: Text, disposer: Disposer) -> Rescoring:
    """Score all answers of the step, those that were not trained on included."""
    run_file = recorded.run_file
    is_rewarded = any(record.reward is not None for record in recorded.records)
    if not run_file.algorithm.learns_from_rollouts:
        return Rescoring()
    if not is_rewarded and not run_file.algorithm.needs_reward:
        return Rescoring(notes=["there are no rewards to recompute: the algorithm needs none"])
    if reason := _obstacle(run_file):
        return Rescoring(notes=[f"rewards are not recomputed: {reason}"])
    try:
        prompts = _prompts_by_id(run_file, text)
        reward = await make_reward(run_file, Given(), disposer)
    except (ConfigError, DataError, MissingExtraError) as error:
        return Rescoring(notes=[f"rewards are not recomputed: {error}"])
    assert reward is not None
    found = [(record, _find(prompts, record)) for record in recorded.records if _is_scored(record)]
    known = [(record, prompt) for record, prompt in found if prompt is not None]
    lost = [record.prompt_id for record, prompt in found if prompt is None]
    notes = []
    if lost:
        notes.append(
            f"{len(lost)} of {len(found)} rewards are not recomputed: their prompts are not in the "
            f"data any more, or were changed (the first: {lost[0]!r})"
        )
    answers = [_answer(run_file, text, record, prompt) for record, prompt in known]
    scored = await _score_all(run_file, reward, answers)
    return Rescoring(scored, notes)


@dataclass(frozen=True, slots=True)
class _Answer:
    record: SampleRecord
    prompt: Prompt
    sample: Sample
    """With the mask that it was sampled with."""
    text: str
    completion: str
    """What the reward was given: the text without its end."""

    @property
    def group(self) -> Group:
        """The answer alone."""
        return Group(self.prompt, [Episode(self.prompt.id, self.sample.episode, [self.sample])])


def _obstacle(run_file: RunFile) -> str | None:
    if run_file.rollout.env != SINGLE_TURN:
        return f"they come from the environment {run_file.rollout.env!r}, which is not played again"
    if not run_file.reward.scorers:
        return (
            "the reward was given in Python and is not in the run file; name it, as in "
            "reward.function=rewards.py:score"
        )
    if run_file.data is None or not run_file.data.all_sources:
        return (
            "the prompts were given in Python, so their answers are not known; name them, as in "
            "data.path=prompts.jsonl"
        )
    return None


def _prompts_by_id(run_file: RunFile, text: Text) -> dict[str, list[Prompt]]:
    """Sources may share ids."""
    prompts: dict[str, list[Prompt]] = {}
    for one in load_prompts(run_file, Given(), text):
        for prompt in one.prompts:
            prompts.setdefault(prompt.id, []).append(prompt)
    return prompts


def _find(prompts: dict[str, list[Prompt]], record: SampleRecord) -> Prompt | None:
    same = (p for p in prompts.get(record.prompt_id, []) if prompt_text(p) == record.prompt)
    return next(same, None)


def _is_scored(record: SampleRecord) -> bool:
    """False for answers that the engine or the environment did not finish."""
    return record.learns and (record.cause is None or record.cause.startswith("reward/"))


def _answer(run_file: RunFile, text: Text, record: SampleRecord, prompt: Prompt) -> _Answer:
    """`rollout.truncated = "mask"` took the mask away: there, the answer follows the prompt."""
    mask = record.mask
    start = mask.index(True) if True in mask else len(text.renderer.encode(prompt))
    answer = record.tokens[start:]
    return _Answer(
        record,
        prompt,
        replace(to_sample(record), mask=[t >= start for t in range(len(record.tokens))]),
        text.renderer.decode(answer),
        scored_text(answer, record.finish, text, run_file.rollout.sampling),
    )


def scored_text(tokens: Sequence[int], finish: str, text: Text, sampling: Sampling) -> str:
    """The text that a reward is given of an answer: without its end token or stop text."""
    decode = text.renderer.decode
    if finish != "stop":
        return decode(tokens)
    if tokens and tokens[-1] in text.end_ids | frozenset(sampling.stop_token_ids):
        return decode(tokens[:-1])
    whole = decode(tokens)
    places = [place for stop in sampling.stop if (place := whole.find(stop)) >= 0]
    return whole[: min(places, default=len(whole))]


async def _score_all(
    run_file: RunFile, reward: Reward, answers: Sequence[_Answer]
) -> list[Rescored]:
    # ends: each score by the reward's time limit
    scores = await asyncio.gather(
        *(
            reward.score(
                answer.prompt,
                answer.completion,
                finish=answer.record.finish,
                num_tokens=sum(answer.sample.mask),
            )
            for answer in answers
        )
    )
    return [
        _settle(answer, score, run_file, zero_failures=reward.on_failure == "zero")
        for answer, score in zip(answers, scores, strict=True)
    ]


def _settle(answer: _Answer, score: Score, run_file: RunFile, *, zero_failures: bool) -> Rescored:
    """What a run makes of a score before it learns from it."""
    is_zeroed = score.value is None and zero_failures
    answer.sample.reward = 0.0 if is_zeroed else score.value
    shape_overlong(answer.group, run_file.rollout)
    return Rescored(
        answer.record,
        answer.text,
        answer.sample.reward,
        cause=None if answer.sample.reward is not None else score.reason,
    )
