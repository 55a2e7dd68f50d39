"""The quickstart on several seeds: accuracy on held-out sums before and after, and the time.

    python benchmarks/quickstart.py [--seeds 5] [--folder runs/benchmark-quickstart]

Fails unless every seed starts at 0.45 or below, ends at 0.75 or above, gains 0.30 or more, and is
done in 5 minutes. The figures stand in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart.py"
MAX_BEFORE, MIN_AFTER, MIN_GAIN, MAX_MINUTES = 0.45, 0.75, 0.30, 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One seed."""

    seed: int
    before: float
    after: float
    minutes: float

    @property
    def is_good(self) -> bool:
        return (
            self.before <= MAX_BEFORE
            and self.after >= MIN_AFTER
            and self.after - self.before >= MIN_GAIN
            and self.minutes < MAX_MINUTES
        )


def run(seed: int, folder: Path) -> Outcome:
    """A fresh quickstart in a process of its own, imports included."""
    run_dir = folder / f"seed-{seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    start_s = time.monotonic()
    command = [sys.executable, str(QUICKSTART), "--seed", str(seed), "--folder", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=1800)
    minutes = (time.monotonic() - start_s) / 60
    rows = [json.loads(line) for line in (run_dir / "grpo/metrics.jsonl").open()]
    accuracy = [row["eval/eval/reward"] for row in rows if "eval/eval/reward" in row]
    return Outcome(seed, accuracy[0], accuracy[-1], minutes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-quickstart"))
    options = parser.parse_args()
    outcomes = []
    print("| seed | before | after | gain | minutes |\n|---|---|---|---|---|")
    for seed in range(options.seeds):
        one = run(seed, options.folder)
        outcomes.append(one)
        gain = one.after - one.before
        print(
            f"| {seed} | {one.before:.3f} | {one.after:.3f} | {gain:+.3f} | {one.minutes:.2f} |",
            flush=True,
        )
    return 0 if all(one.is_good for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
