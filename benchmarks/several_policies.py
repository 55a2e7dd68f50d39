"""Solver and verifier in one run, on several seeds: both held-out accuracies before and after.

    python benchmarks/several_policies.py [--seeds 5] [--first 0] [--folder runs/benchmark-several]

Fails unless both gain 0.15 or more on every seed, the verifier ends above 0.65 on answers of which
half are right, and each seed is done in 8 minutes, warm-up and imports included. The figures stand
in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples/solver_verifier/run.py"
MIN_GAIN, MIN_JUDGING, MAX_MINUTES = 0.15, 0.65, 8.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One seed: before and after, wall time, and the processor time of all threads."""

    seed: int
    solving: tuple[float, float]
    judging: tuple[float, float]
    minutes: float
    processor_minutes: float

    @property
    def is_good(self) -> bool:
        gains = [after - before for before, after in (self.solving, self.judging)]
        is_in_time = min(self.minutes, self.processor_minutes) < MAX_MINUTES
        return min(gains) >= MIN_GAIN and self.judging[1] > MIN_JUDGING and is_in_time

    def __str__(self) -> str:
        cells = [
            cell
            for before, after in (self.solving, self.judging)
            for cell in (f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}")
        ]
        times = [f"{self.minutes:.1f}", f"{self.processor_minutes:.1f}"]
        return f"| {' | '.join([str(self.seed), *cells, *times])} |"


def run(seed: int, folder: Path) -> Outcome:
    """A fresh run in a process of its own."""
    run_dir = folder / f"seed-{seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    start_s, used_s = time.monotonic(), _children_s()
    command = [sys.executable, str(EXAMPLE), "--seed", str(seed), "--folder", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=3600)
    minutes, processor = (time.monotonic() - start_s) / 60, (_children_s() - used_s) / 60
    text = (run_dir / "solver-verifier/metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]

    def of(name: str) -> tuple[float, float]:
        values = [row[name] for row in rows if name in row]
        return values[0], values[-1]

    solving, judging = of("eval/solving/reward"), of("eval/judging/reward")
    return Outcome(seed, solving, judging, minutes, processor)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-several"))
    options = parser.parse_args()
    print(
        "| seed | solver before | after | gain | verifier before | after | gain | minutes | cpu |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    outcomes = []
    for seed in range(options.first, options.first + options.seeds):
        outcomes.append(run(seed, options.folder))
        print(outcomes[-1], flush=True)
    return 0 if all(one.is_good for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
