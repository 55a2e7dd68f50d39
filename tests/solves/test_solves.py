"""Each algorithm raises the reward of a small task into its band, and a broken one does not.

One seed by default; `PACELINE_SOLVES_SEEDS=3` runs all that `bands.json` was measured with, and
breaks every algorithm. The bands are written by `measure.py`, which stands beside this file.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from solves.solving import CASES, Band, Outcome, Start, make_start, read_bands, solve

from paceline.algorithms import ALGORITHMS
from paceline.algorithms.base import Credit

NUM_SEEDS = int(os.environ.get("PACELINE_SOLVES_SEEDS", "1"))
BROKEN = ["grpo"]
"""Cases of which it is shown that their bands notice faults."""
if NUM_SEEDS > 1:
    BROKEN = [name for name, case in CASES.items() if case.objective.needs_reward]

Change = Callable[[list[list[float]]], list[list[float]]]


@pytest.fixture(scope="session")
def start_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Start]:
    """The start of a seed, made at its first use and shared by all cases."""
    made: dict[int, Start] = {}

    def start(seed: int) -> Start:
        if seed not in made:
            made[seed] = make_start(tmp_path_factory.mktemp("start"), seed)
        return made[seed]

    return start


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
@pytest.mark.parametrize("name", CASES)
def test_it_solves(name: str, seed: int, start_of: Callable[[int], Start], tmp_path: Path) -> None:
    if CASES[name].lacks is not None:
        pytest.skip(CASES[name].lacks)
    outcome = solve(CASES[name], start_of(seed), tmp_path / name)
    assert read_bands()[name].problems(outcome) == [], outcome


def negated(columns: list[list[float]]) -> list[list[float]]:
    return [[-advantage for advantage in column] for column in columns]


def shifted(columns: list[list[float]]) -> list[list[float]]:
    """Each sample gets the advantage of the sample before it."""
    donors = [max(column, key=abs) for column in [columns[-1], *columns[:-1]]]
    return [
        [donor if advantage else 0.0 for advantage in column]
        for donor, column in zip(donors, columns, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("change", [negated, shifted])
@pytest.mark.parametrize("name", BROKEN)
def test_wrong_advantages_leave_the_band(
    name: str,
    change: Change,
    start_of: Callable[[int], Start],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    algorithm: Any = ALGORITHMS[CASES[name].kind]
    true_credit = algorithm.credit

    def credit(*given: Any) -> Credit:
        found = true_credit(*given)
        return dataclasses.replace(found, advantages=change(found.advantages))

    monkeypatch.setattr(algorithm, "credit", credit)
    outcome = solve(CASES[name], start_of(0), tmp_path / name)
    assert read_bands()[name].problems(outcome), outcome
    if change is negated:
        assert outcome.gain < 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "sft"])
def test_no_learning_leaves_the_band(
    name: str, start_of: Callable[[int], Start], tmp_path: Path
) -> None:
    case = dataclasses.replace(CASES[name], num_steps=2)
    outcome = solve(case, start_of(0), tmp_path / name, **{"trainer.lr": 0.0})
    assert outcome.gain == 0.0
    assert read_bands()[name].problems(outcome), outcome


@pytest.mark.slow
def test_a_critic_that_learns_nothing_leaves_the_band(
    start_of: Callable[[int], Start], tmp_path: Path
) -> None:
    outcome = solve(CASES["ppo"], start_of(0), tmp_path / "ppo", **{"critic.lr": 0.0})
    assert read_bands()["ppo"].problems(outcome), outcome


def test_every_algorithm_has_a_case_and_every_case_a_band() -> None:
    assert {case.kind for case in CASES.values()} == set(ALGORITHMS)
    able = [name for name, case in CASES.items() if case.lacks is None]
    assert list(read_bands()) == able, "run tests/solves/measure.py"


@pytest.mark.parametrize(("name", "band"), read_bands().items())
def test_bands_ask_for_something(name: str, band: Band) -> None:
    assert band.low >= 0.6
    assert band.high - band.low <= 0.25
    assert band.min_gain >= 0.3


def test_a_band_names_what_lies_outside() -> None:
    band = Band(0.8, 0.9, 0.4, watched_high=0.5)
    assert band.problems(Outcome(0.3, 0.85, 5.0, 0.4)) == []
    assert len(band.problems(Outcome(0.3, 0.95, 5.0, 0.4))) == 1
    assert len(band.problems(Outcome(0.3, 0.75, 5.0, 0.4))) == 1
    assert len(band.problems(Outcome(0.5, 0.85, 5.0, 0.4))) == 1
    assert len(band.problems(Outcome(0.3, 0.85, 121.0, 0.4))) == 1
    assert len(band.problems(Outcome(0.3, 0.85, 5.0, 0.6))) == 1
    assert len(band.problems(Outcome(0.3, float("nan"), 5.0, float("nan")))) == 2
