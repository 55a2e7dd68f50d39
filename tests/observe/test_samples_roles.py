"""Samples of several roles on disk and on the screen."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from batches import make_group, make_sample
from crashing import FastFiles
from rich.console import Console

from paceline.observe.regroup import regroup
from paceline.observe.samples import SampleWriter, read_samples
from paceline.observe.samples_view import choose, show_samples, summary_line
from paceline.types import Group, Sample, Status


def other(text: str, role: str = "rival") -> Sample:
    """What an endpoint said."""
    return Sample(
        "judge-7b", "p", 0, [], [], [], [], Status.COMPLETED, role=role, reward=9.0, text=text,
        finish="stop", label="step-20",
    )  # fmt: skip


def game(draw: int = 0) -> Group:
    samples = [
        [
            make_sample(1.0, policy="a", role="solver", episode=i),
            make_sample(0.0, policy="b", role="verifier", episode=i),
        ]
        for i in range(2)
    ]
    group = make_group(samples, draw=draw)
    group.episodes[0].others = [other("well"), other("no")]
    return group


def write(folder: Path, policy: str | None = None) -> Path:
    column = [0.0, 0.5, 0.5]
    num = 4 if policy is None else 2
    return SampleWriter(folder / "samples", files=FastFiles()).write(
        3, [game()], [column] * num, policy=policy, dropped=[(game(1), "failed")]
    )


def test_what_does_not_learn_is_kept_beside_its_episode(tmp_path: Path) -> None:
    records = read_samples(write(tmp_path))
    assert [(r.draw, r.episode, r.role, r.learns, r.label) for r in records[:6]] == [
        (0, 0, "solver", True, ""),
        (0, 0, "verifier", True, ""),
        (0, 0, "rival", False, "step-20"),
        (0, 0, "rival", False, "step-20"),
        (0, 1, "solver", True, ""),
        (0, 1, "verifier", True, ""),
    ]
    assert [r.advantage for r in records[:6]] == [0.5, 0.5, None, None, 0.5, 0.5]
    assert (records[2].text, records[2].tokens, records[2].num_tokens) == ("well", [], 0)


def test_they_come_back_as_they_were(tmp_path: Path) -> None:
    groups = regroup(read_samples(write(tmp_path)))
    assert [group.episodes for group in groups] == [game().episodes, game(1).episodes]


def test_of_one_policy_with_its_credit_alone(tmp_path: Path) -> None:
    records = read_samples(write(tmp_path, "b"))
    assert [(r.draw, r.role) for r in records if r.learns] == [(0, "verifier")] * 2 + [
        (1, "verifier")
    ] * 2
    assert sum(not r.learns for r in records) == 4
    with pytest.raises(ValueError, match="zip"):
        SampleWriter(tmp_path, files=FastFiles()).write(3, [game()], [[0.0] * 3] * 4, policy="b")


def test_files_of_runs_with_one_role_have_no_new_keys(tmp_path: Path) -> None:
    group = make_group([[make_sample(1.0)]])
    path = SampleWriter(tmp_path, files=FastFiles()).write(1, [group])
    (record,) = read_samples(path)
    assert (record.learns, record.label, record.extra) == (True, "", {})


def shown(folder: Path, **options: object) -> str:
    out = StringIO()
    show_samples(Console(file=out, width=120), folder / "samples", **options)  # type: ignore[arg-type]
    return out.getvalue()


def test_the_best_and_the_worst_are_of_those_that_learn(tmp_path: Path) -> None:
    records = read_samples(write(tmp_path))
    chosen = choose(records, best=9, worst=9, first=9)
    assert len(chosen["best"]) == 8
    assert all(record.learns for record in chosen["best"])
    assert len(chosen["first"]) == 9
    assert summary_line(3, records).plain.startswith("step 3: 8 samples (8 completed)")


def test_roles_are_shown_and_can_be_chosen(tmp_path: Path) -> None:
    write(tmp_path)
    everything = shown(tmp_path, first=4)
    assert "role solver (a)" in everything
    assert "role rival" in everything
    assert "(step-20)" in everything
    assert "does not learn" in everything
    one = shown(tmp_path, role="verifier")
    assert "role verifier (b)" in one
    assert "solver" not in one
