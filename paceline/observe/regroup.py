"""From the samples that a step left on disk back to the groups that it was made of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TypeVar

from paceline.observe.samples import SampleRecord
from paceline.types import NO_VERSION, Episode, Group, Prompt, Sample, Status

Number = TypeVar("Number", int, float)


def regroup(records: Sequence[SampleRecord]) -> list[Group]:
    """Groups in the order of the file, with episodes and samples in theirs.

    Whether a group was trained on is left to the caller: filter by `dropped` first. A prompt is
    what people read of it: its answer and its metadata are not kept.
    """
    return [
        _group(draw, list(found)) for draw, found in groupby(records, lambda record: record.draw)
    ]


def _group(draw: int, records: list[SampleRecord]) -> Group:
    first = records[0]
    episodes = [
        _episode(index, list(found)) for index, found in groupby(records, lambda r: r.episode)
    ]
    return Group(Prompt(first.prompt_id, text=first.prompt), episodes, draw)


def _episode(index: int, records: list[SampleRecord]) -> Episode:
    samples = [to_sample(record) for record in records if record.learns]
    others = [to_sample(record) for record in records if not record.learns]
    return Episode(records[0].prompt_id, index, samples, others=others)


def to_sample(record: SampleRecord) -> Sample:
    """The sample as it was learned from. Raises ValueError if its columns do not fit."""
    mask = record.mask
    return Sample(
        policy=record.policy,
        prompt_id=record.prompt_id,
        episode=record.episode,
        tokens=list(record.tokens),
        mask=mask,
        logprobs=_spread(mask, record.logprobs, 0.0),
        versions=_spread(mask, record.token_versions or [NO_VERSION] * sum(mask), NO_VERSION),
        status=Status(record.status),
        temperature=record.temperature,
        role=record.role,
        row=record.row,
        reward=record.reward,
        reward_parts=dict(record.parts),
        text=record.text,
        finish=record.finish,
        cause=record.cause,
        detail=record.detail,
        label=record.label,
    )


def _spread(mask: Sequence[bool], values: Sequence[Number], outside: Number) -> list[Number]:
    """One number a token, from one for each token inside the mask."""
    if len(values) != sum(mask):
        raise ValueError(f"{len(values)} numbers for {sum(mask)} sampled tokens")
    inside = iter(values)
    return [next(inside) if trained else outside for trained in mask]
