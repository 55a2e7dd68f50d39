"""Recorded numbers against replayed ones: pure functions, one for each part of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.build.recorded import RecordedStep, trained_samples
from paceline.build.rescore import Rescored
from paceline.observe.samples import SampleRecord
from paceline.types import Sample


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Numbers agree if they differ by no more than `absolute` or `relative` of the larger."""

    relative: float = 1e-4
    absolute: float = 1e-6

    def allows(self, one: float | None, other: float | None) -> bool:
        if one is None or other is None:
            return one is other
        if math.isnan(one) or math.isnan(other):
            return math.isnan(one) and math.isnan(other)
        if one == other:
            return True
        return abs(one - other) <= max(self.absolute, self.relative * max(abs(one), abs(other)))


OF_REWARDS = Tolerance(1e-6, 1e-9)
"""The same code on the same text; a reward that computes in float32 may differ in its last bit."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that was recorded and does not come out again.

    Example: Difference("reward", "prompt 'add-17', episode 3", recorded=1.0, replayed=0.0).
    """

    part: str
    """reward, text, advantage, log-prob or metric."""
    where: str
    """Which sample and token, or the name of the metric."""
    recorded: float | str | None
    replayed: float | str | None
    note: str = ""

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        what = self.where if self.part == "metric" else f"{self.part} of {self.where}"
        return f"{what}: recorded {_shown(self.recorded)}, replayed {_shown(self.replayed)}{note}"


def compare_text(answer: Rescored) -> Difference | None:
    if answer.text == answer.record.text:
        return None
    return Difference("text", _place(answer.record), answer.record.text, answer.text)


def compare_reward(answer: Rescored) -> Difference | None:
    record = answer.record
    if OF_REWARDS.allows(record.reward, answer.reward):
        return None
    note = answer.cause or (record.cause if record.reward is None else None) or ""
    return Difference("reward", _place(record), record.reward, answer.reward, note)


def compare_credit(
    records: Sequence[SampleRecord], advantages: Sequence[Sequence[float]], tolerance: Tolerance
) -> Iterator[Difference | None]:
    """One for each sample with a trained token; the token that is farthest off is named."""
    for record, column in zip(records, advantages, strict=True):
        trained = [t for t, inside in enumerate(record.mask) if inside]
        if not trained:
            continue
        kept = record.advantage
        before = kept if isinstance(kept, list) else [kept] * len(trained)
        off = [
            (abs((old or 0.0) - column[t]), t, old)
            for t, old in zip(trained, before, strict=True)
            if not tolerance.allows(old, column[t])
        ]
        if not off:
            yield None
            continue
        _, token, old = max(off, key=lambda found: found[0])
        where = _place(record)
        if isinstance(kept, list) or len({column[t] for t in trained}) > 1:
            where += f", token {token}"
        yield Difference("advantage", where, old, column[token])


def compare_logprobs(
    recorded: RecordedStep, old: Sequence[Sequence[float]], tolerance: Tolerance
) -> Iterator[Difference | None]:
    """The run recorded how far apart engine and trainer were at most; no token may be farther."""
    largest = recorded.row.get("train/mismatch_max")
    if largest is None:
        return
    allowed = largest * (1 + tolerance.relative) + tolerance.absolute
    for sample, column in zip(trained_samples(recorded.groups), old, strict=True):
        for t, inside in enumerate(sample.mask):
            if not inside:
                continue
            gap = abs(sample.logprobs[t] - column[t])
            if gap <= allowed or not math.isfinite(largest):
                yield None
            else:
                note = f"engine and trainer were at most {largest:.3g} apart"
                where = f"{_place(sample)}, token {t}"
                yield Difference("log-prob", where, sample.logprobs[t], column[t], note)


def compare_metrics(
    numbers: Mapping[str, tuple[float, float]], tolerance: Tolerance
) -> Iterator[Difference | None]:
    """numbers: name -> recorded and replayed."""
    for name, (kept, found) in numbers.items():
        agrees = tolerance.allows(kept, found)
        yield None if agrees else Difference("metric", name, kept, found)


def _place(sample: SampleRecord | Sample) -> str:
    row = f", row {sample.row}" if sample.row else ""
    return f"prompt {sample.prompt_id!r}, episode {sample.episode}{row}"


def _shown(value: float | str | None) -> str:
    if value is None:
        return "none"
    return repr(value) if isinstance(value, str) else f"{value:.6g}"
