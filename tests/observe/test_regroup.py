from __future__ import annotations

from pathlib import Path

import pytest
from crashing import FastFiles

from paceline.observe.regroup import regroup, to_sample
from paceline.observe.samples import SampleWriter, read_samples
from paceline.types import Episode, Group, Prompt, Sample, Status


def make_sample(episode: int, row: int = 0) -> Sample:
    return Sample(
        "policy", "p1", episode, [5, 6, 7, 2, 8], [False, False, True, True, False],
        [0.0, 0.0, -0.125, -2.0, 0.0], [-1, -1, 4, 5, -1], Status.TRUNCATED, temperature=0.5,
        role="writer", row=row, reward=0.25, reward_parts={"a": 0.25}, text="ab", finish="length",
        cause="reward/none", detail="why",
    )  # fmt: skip


def test_groups_come_back_as_they_were(tmp_path: Path) -> None:
    groups = [
        Group(
            Prompt("p1", text="1+1="),
            [Episode("p1", i, [make_sample(i, row) for row in range(2)]) for i in range(3)],
            draw,
        )
        for draw in (4, 5)
    ]
    writer = SampleWriter(tmp_path / "samples", files=FastFiles())
    assert regroup(read_samples(writer.write(1, groups))) == groups


def test_columns_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    group = Group(Prompt("p1"), [Episode("p1", 0, [make_sample(0)])])
    writer = SampleWriter(tmp_path / "samples", files=FastFiles())
    (record,) = read_samples(writer.write(1, [group]))
    record.logprobs.append(0.0)
    with pytest.raises(ValueError, match="3 numbers for 2 sampled tokens"):
        to_sample(record)
