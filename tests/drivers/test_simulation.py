"""The driver of several clocks under ten thousand seeded schedules; see simulation.py.

A failing seed prints its settings, how its lives ended, the end of its schedule, and how to run it
alone.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from drivers.simulation import Timeline, outcomes_differ

NUM_FAST, NUM_ALL = 1000, 10_000
SLOW = (pytest.mark.slow, pytest.mark.timeout(900))
ALONE = os.environ.get("SIMULATION_SEED")
SEEDS = [
    pytest.param(range(NUM_FAST), id="some"),
    pytest.param(range(NUM_FAST, NUM_ALL), id="all", marks=SLOW),
]


@pytest.fixture(autouse=True)
def _is_silent() -> Iterator[None]:
    """Thousands of runs that fail on purpose have a lot to say."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def simulate(seed: int) -> Timeline:
    timeline = Timeline(seed)
    try:
        timeline.run()
        if timeline.settings.is_deterministic and seed % 2:
            differs = outcomes_differ(timeline)
            assert not differs, f"times and restarts decide about {differs}"
    except BaseException as error:
        error.add_note(
            f"seed {seed}: {vars(timeline.settings)}; lives: {dict(timeline.ends)}\n"
            f"alone: SIMULATION_SEED={seed} python -m pytest {__file__} -k some"
        )
        raise
    return timeline


def what_befell(seeds: Sequence[int]) -> Counter[str]:
    logging.disable()
    befell: Counter[str] = Counter()
    for seed in seeds:
        timeline = simulate(seed)
        befell += timeline.ends
        befell["saves"] += len(timeline.disk.saved)
        befell["evals"] += len(timeline.evals)
        befell["asked"] += timeline.num_asked
        befell["alone"] += len(timeline.settings.paces) == 1
        befell["shared"] += len(timeline.settings.shared) > 1
        befell["deterministic"] += timeline.settings.is_deterministic
    return befell


@pytest.mark.parametrize("seeds", SEEDS)
def test_no_schedule_breaks_a_run(seeds: range) -> None:
    """Ten thousand take two minutes of a core, so the many are shared out among the cores."""
    if ALONE:
        what_befell([int(ALONE)])
    elif len(seeds) == NUM_FAST:
        befell = what_befell(seeds)
    else:
        parts = [seeds[i : i + NUM_FAST // 4] for i in range(0, len(seeds), NUM_FAST // 4)]
        with ProcessPoolExecutor(mp_context=get_context("forkserver")) as pool:
            befell = sum(pool.map(what_befell, parts), Counter())
    if ALONE is None:
        assert befell["ended"] == len(seeds)
        rare = {name: befell[name] for name in ("killed", "failed", "cancelled", "asked", "alone")}
        assert min(rare.values()) > len(seeds) // 30, rare
        common = {name: befell[name] for name in ("saves", "evals", "shared", "deterministic")}
        assert min(common.values()) > len(seeds) // 8, common


def test_the_same_seed_gives_the_same_history() -> None:
    first, second = simulate(17), simulate(17)
    assert first.outcome() == second.outcome()
    assert first.ends == second.ends


def test_a_failing_seed_says_how_to_run_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def learn_twice(timeline: Timeline) -> None:
        batches = timeline.life.policies["a"].trainer.batches
        batches.append(batches[0])
        check(timeline)

    check = Timeline.verify
    monkeypatch.setattr(Timeline, "verify", learn_twice)
    with pytest.raises(AssertionError, match="a trained on a draw twice") as caught:
        simulate(3)
    (note,) = [note for note in caught.value.__notes__ if note.startswith("seed 3: ")]
    assert "SIMULATION_SEED=3" in note
    assert "Pace(batch=" in note
