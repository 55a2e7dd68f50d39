from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from crashing import FastFiles
from rich.console import Console

from paceline.errors import DataError
from paceline.observe.samples import SampleRecord, SampleWriter
from paceline.observe.samples_view import choose, show_samples
from paceline.types import Episode, Group, Prompt, Sample, Status


def record(reward: float | None, episode: int) -> SampleRecord:
    return SampleRecord(
        prompt_id="p", draw=0, episode=episode, role="policy", policy="policy",
        status="completed", finish="stop", cause=None, reward=reward, parts={}, advantage=None,
        versions=[], num_tokens=1, text="", prompt="", tokens=[], mask_runs=[], logprobs=[],
    )  # fmt: skip


def indices(records: list[SampleRecord]) -> list[int]:
    return [item.episode for item in records]


def test_best_worst_and_first() -> None:
    rewards = [0.5, None, 1.0, 0.0, 1.0, float("nan"), 0.2]
    chosen = choose([record(r, i) for i, r in enumerate(rewards)], best=2, worst=2, first=2)
    assert {title: indices(found) for title, found in chosen.items()} == {
        "best": [2, 4],
        "worst": [3, 6],
        "first": [0, 1],
    }


def test_no_sample_is_both_best_and_worst() -> None:
    chosen = choose([record(0.5, 0), record(0.1, 1)], best=3, worst=3, first=0)
    assert indices(chosen["best"]) == [0, 1]
    assert chosen["worst"] == []


def write(folder: Path, step: int, texts: list[str]) -> None:
    samples = [
        Sample(
            "policy", "add-1", i, [3, 4], [False, True], [0.0, -0.5], [-1, 2],
            Status.COMPLETED, reward=float(i), reward_parts={"exact": float(i)}, text=text,
            finish="stop",
        )
        for i, text in enumerate(texts)
    ]  # fmt: skip
    episodes = [Episode("add-1", sample.episode, [sample]) for sample in samples]
    group = Group(Prompt("add-1", text="1+1= [bold]"), episodes)
    advantages = [[0.0, sample.episode - 0.5] for sample in samples]
    SampleWriter(folder / "samples", files=FastFiles()).write(step, [group], advantages)


def shown(folder: Path, step: int | None = None, **changes: int) -> str:
    out = StringIO()
    console = Console(file=out, width=120, color_system=None)
    show_samples(console, folder / "samples", step, **changes)
    return out.getvalue()


def test_tables_show_what_a_reader_needs(tmp_path: Path) -> None:
    write(tmp_path, 3, ["wrong", "right"])
    text = shown(tmp_path, best=1, worst=1)
    assert "step 3: 2 samples (2 completed), mean reward 0.5" in text
    best, _, worst = text.partition("worst")
    for word in ("right", "1+1= [bold]", "add-1 #1", "tokens 1", "completed (stop)", "exact 1"):
        assert word in best
    assert "advantage 0.5" in best
    assert "wrong" in worst
    assert "advantage -0.5" in worst
    assert "right" not in worst


def test_control_characters_of_a_model_do_not_reach_the_terminal(tmp_path: Path) -> None:
    write(tmp_path, 1, ["a\x1b[31mb\x07c\x9b2Jd‮e\ud800", "[red]x[/red] [/]"])
    text = shown(tmp_path)
    assert "a␛[31mb␇c�2Jd�e�" in text
    assert "[red]x[/red] [/]" in text
    assert not {"\x1b", "\x07", "\x9b", "‮"} & set(text)


def test_long_answers_are_cut(tmp_path: Path) -> None:
    write(tmp_path, 1, ["y" * 5000])
    assert 500 < shown(tmp_path).count("y") < 700


def test_a_missing_step_is_said_in_words(tmp_path: Path) -> None:
    write(tmp_path, 8, ["a"])
    assert "step 8: 1 samples" in shown(tmp_path)
    with pytest.raises(DataError, match=r"no samples of step 7 .*nearest step is 8"):
        shown(tmp_path, 7)


def test_a_failure_is_shown_with_its_detail(tmp_path: Path) -> None:
    failed = Sample(
        "policy", "add-1", 0, [3, 4], [False, True], [0.0, -0.5], [-1, 2], Status.UNSCORED,
        text="?", cause="reward/ValueError", detail="no number [x]\x1b" + "y" * 5000,
    )  # fmt: skip
    group = Group(Prompt("add-1", text="1+1="), [Episode("add-1", 0, [failed])])
    SampleWriter(tmp_path / "samples", files=FastFiles()).write(1, [group])
    text = shown(tmp_path, first=1)
    assert "reward/ValueError" in text
    assert "no number" in text
    assert "[x]␛y" in text
    assert 150 < text.count("y") < 300
