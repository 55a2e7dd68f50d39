"""Measures where each algorithm ends on the task of `solving.py`, and writes `bands.json`.

    python tests/solves/measure.py [--only grpo ppo] [--seeds 0 1 2] [--check]

For use after a change that is meant to move the results, and for a new algorithm. A band reaches
beyond what was measured, by more than the spread between seeds: another processor or release of
torch rounds otherwise, and makes another trajectory of each run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from solving import BANDS_FILE, CASES, Band, Outcome, make_start, read_bands, solve

SLACK = 0.04
"""Of the final reward and of the gain."""
WATCHED_FACTOR = 1.5
"""Ceiling over the largest measured value."""


def main() -> None:
    parser = argparse.ArgumentParser()
    able = [name for name, case in CASES.items() if case.lacks is None]
    parser.add_argument("--only", nargs="+", choices=able, default=able, metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--check", action="store_true", help="compare with the bands, write none")
    options = parser.parse_args()
    bands = read_bands() if BANDS_FILE.exists() else {}
    print(f"{'case':24}{'seed':>5}{'start':>8}{'final':>8}{'watched':>9}{'seconds':>9}")
    outcomes: dict[str, list[Outcome]] = {name: [] for name in options.only}
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as scratch:
            start = make_start(Path(scratch), seed)
            for name in options.only:
                outcome = solve(CASES[name], start, Path(scratch) / name)
                outcomes[name].append(outcome)
                problems = bands[name].problems(outcome) if options.check else []
                print(_line(name, seed, outcome), *problems, sep="  ", flush=True)
    if not options.check:
        bands |= {name: make_band(found) for name, found in outcomes.items()}
        _write(bands)
        _print_bands(bands)


def make_band(found: Sequence[Outcome]) -> Band:
    """The band around what was measured."""
    finals = [outcome.final for outcome in found]
    watched = [outcome.watched for outcome in found if outcome.watched is not None]
    return Band(
        low=round(min(finals) - SLACK, 3),
        high=round(min(1.0, max(finals) + SLACK), 3),
        min_gain=round(min(outcome.gain for outcome in found) - SLACK, 3),
        watched_high=round(max(watched) * WATCHED_FACTOR, 3) if watched else None,
    )


def _write(bands: dict[str, Band]) -> None:
    """In the order of the cases; bands of cases that are gone go too."""
    table = {
        name: {key: value for key, value in asdict(bands[name]).items() if value is not None}
        for name in CASES
        if name in bands
    }
    BANDS_FILE.write_text(json.dumps(table, indent=2) + "\n")


def _line(name: str, seed: int, outcome: Outcome) -> str:
    watched = "" if outcome.watched is None else f"{outcome.watched:.3f}"
    return (
        f"{name:24}{seed:>5}{outcome.start:>8.3f}{outcome.final:>8.3f}{watched:>9}"
        f"{outcome.seconds:>9.1f}"
    )


def _print_bands(bands: dict[str, Band]) -> None:
    print(f"\n{'band':24}{'low':>8}{'high':>8}{'min gain':>10}{'watched':>9}")
    for name, band in bands.items():
        watched = "" if band.watched_high is None else f"{band.watched_high:.3f}"
        print(f"{name:24}{band.low:>8.3f}{band.high:>8.3f}{band.min_gain:>10.3f}{watched:>9}")


if __name__ == "__main__":
    main()
