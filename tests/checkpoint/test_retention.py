from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from crashing import FastFiles
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.checkpoint import Best, CheckpointStore
from paceline.checkpoint.retention import rank, steps_to_keep
from paceline.checkpoint_settings import CheckpointConfig

STEPS = st.sets(st.integers(0, 50), max_size=12)
SCORES = st.dictionaries(st.integers(0, 50), st.floats(allow_infinity=True), max_size=12)


def scored(**changes: object) -> CheckpointConfig:
    return CheckpointConfig(best_metric="train/loss", **changes)  # type: ignore[arg-type]


@given(STEPS, SCORES, st.integers(1, 4), st.integers(1, 4), st.sampled_from(["max", "min"]))
def test_the_newest_and_the_best_always_stay(
    steps: set[int], scores: dict[int, float], last: int, best: int, mode: str
) -> None:
    config = scored(keep_last=last, keep_best=best, best_mode=mode)
    keep = steps_to_keep(steps, scores, config)
    numbers = {s: v for s, v in scores.items() if s in steps and not math.isnan(v)}
    assert keep <= steps
    assert len(keep) <= last + best
    assert set(sorted(steps)[-last:]) <= keep
    if numbers:
        top = max(numbers.values()) if mode == "max" else min(numbers.values())
        assert min(s for s, v in numbers.items() if v == top) in keep
    for dropped in steps - keep:
        assert sum(s > dropped for s in steps) >= last


def test_without_a_metric_only_the_last_stay() -> None:
    assert steps_to_keep({1, 2, 3}, {1: 9.0}, CheckpointConfig(keep_last=2)) == {2, 3}


def test_of_equal_scores_the_earliest_is_the_best() -> None:
    ranked = rank({4: 0.5, 2: 0.5, 3: 0.1, 9: math.nan}, scored())
    assert ranked == [Best(2, 0.5), Best(4, 0.5), Best(3, 0.1)]


class Run:
    """Saves empty checkpoints."""

    def __init__(self, root: Path, config: CheckpointConfig) -> None:
        self.store = CheckpointStore(root, config, FastFiles())

    def save(self, *steps: int) -> None:
        for step in steps:
            with self.store.staging(step) as staged:
                staged.write_json("data.json", {"step": step})
                self.store.commit(staged)


def test_saves_at_every_step_with_evals_at_some_keep_the_best(tmp_path: Path) -> None:
    run = Run(tmp_path, scored(keep_last=2, every=1))
    accuracy = {10: 0.4, 20: 0.8, 30: 0.6}
    for step in range(1, 36):
        run.save(step)
        if step in accuracy:
            run.store.record(step, {"train/loss": accuracy[step], "train/lr": 1.0})
    assert run.store.steps() == [20, 34, 35]
    assert run.store.best() == Best(20, 0.8)
    assert json.loads((tmp_path / "best.json").read_text()) == {
        "best": "step-000020",
        "metric": "train/loss",
        "mode": "max",
        "scores": {"20": 0.8, "30": 0.6},
    }


def test_record_tells_whether_the_best_changed(tmp_path: Path) -> None:
    run = Run(tmp_path, scored(keep_last=9, best_mode="min"))
    run.save(1, 2, 3)
    assert run.store.record(1, {"train/loss": 0.5}) == Best(1, 0.5)
    assert run.store.record(2, {"train/loss": 0.7}) is None
    assert run.store.record(3, {"train/loss": 0.3}) == Best(3, 0.3)
    assert run.store.record(3, {"train/lr": 0.1}) is None
    assert run.store.record(8, {"train/loss": 0.1}) is None, "there is no checkpoint of step 8"


def test_a_checkpoint_whose_eval_still_runs_stays(tmp_path: Path) -> None:
    run = Run(tmp_path, scored(keep_last=1))
    run.save(1)
    run.store.await_score(1)
    run.save(2, 3)
    assert run.store.steps() == [1, 3]
    run.store.record(1, {"train/loss": 0.9})
    run.store.await_score(3)
    run.save(4)
    assert run.store.steps() == [1, 3, 4]
    run.store.forgo(3)
    assert run.store.steps() == [1, 4]
    run.store.await_score(4)
    run.save(5)
    assert run.store.record(4, {"train/lr": 0.1}) is None
    assert run.store.steps() == [1, 5]


def test_scores_survive_a_restart_unless_the_metric_changes(tmp_path: Path) -> None:
    first = Run(tmp_path, scored(keep_last=1))
    first.save(1)
    first.store.record(1, {"train/loss": 0.9})
    again = Run(tmp_path, scored(keep_last=1))
    again.save(2)
    assert again.store.best() == Best(1, 0.9)
    other = Run(tmp_path, CheckpointConfig(best_metric="train/lr", keep_last=1))
    assert other.store.best() is None
    other.save(3)
    assert other.store.steps() == [3]


def test_damaged_later_ones_never_push_out_a_whole_one(tmp_path: Path) -> None:
    """Steps 3 and 4 look complete by their sizes: a run resumed from 1 must not trust them."""
    run = Run(tmp_path, scored(keep_last=3))
    run.save(1, 3, 4)
    for step in (3, 4):
        path = tmp_path / f"step-00000{step}" / "data.json"
        path.write_bytes(path.read_bytes().replace(str(step).encode(), b"9"))
    resumed = Run(tmp_path, scored(keep_last=1))
    found = resumed.store.newest()
    assert found.checkpoint is not None
    assert found.checkpoint.step == 1
    resumed.save(2)
    newest = resumed.store.newest().checkpoint
    assert newest is not None
    assert newest.step == 2
    resumed.save(3, 4, 5)
    assert resumed.store.steps() == [5]


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.floats(0, 1) | st.none(), min_size=1, max_size=7),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_a_run_of_saves_and_scores_keeps_what_the_rules_say(
    tmp_path_factory: pytest.TempPathFactory,
    scores: list[float | None],
    last: int,
    best: int,
) -> None:
    run = Run(tmp_path_factory.mktemp("run"), scored(keep_last=last, keep_best=best))
    for step, score in enumerate(scores, start=1):
        run.save(step)
        if score is not None:
            run.store.record(step, {"train/loss": score})
    known = {step: s for step, s in enumerate(scores, start=1) if s is not None}
    top = sorted(known, key=lambda step: (-known[step], step))[:best]
    assert set(run.store.steps()) >= set(range(1, len(scores) + 1)[-last:]) | set(top)
    assert len(run.store.steps()) <= last + best


def test_an_unknown_metric_is_an_error_at_the_start() -> None:
    with pytest.raises(ValidationError, match=r"'train/los'; nearest: train/loss"):
        CheckpointConfig(best_metric="train/los")


def test_a_metric_of_an_unknown_eval_set_is_an_error_at_the_start() -> None:
    config = CheckpointConfig.model_construct(best_metric="eval/held/reward")
    assert config.best_metric_problem(["held", "other"]) is None
    assert "nearest: 'heldout'" in str(config.best_metric_problem(["heldout", "x"]))
    assert "has no eval sets" in str(config.best_metric_problem([]))
    assert scored().best_metric_problem([]) is None
    assert CheckpointConfig().best_metric_problem([]) is None
