"""From the start of Python to the end of the first step, by phase, for the quickstart's model.

    python benchmarks/startup.py MODEL [--turns 5] [--imports]

MODEL: what the warm-up of `examples/quickstart.py` leaves. Each turn is a fresh process without
evals; seconds are of the clock and, in brackets, of the processor. `--imports` lists the modules
whose import takes longest. Fails if the first step ends later than 10 s of processor time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MAX_S = 10.0
PHASES = ("python", "import paceline", "import torch", "import the rest", "open", "first step")


def child(model: str, folder: str, began_s: float) -> None:
    """One start; prints when each phase had ended, of the clock and of the processor."""
    marks: list[tuple[float, float]] = []

    def mark() -> None:
        marks.append((time.time() - began_s, time.process_time()))

    mark()
    import paceline

    mark()
    import torch  # noqa: F401

    mark()
    from paceline.build import recording, training

    mark()
    assert training

    class Marked(recording.Recorder):
        def begin_step(self, policy: str, step: int) -> None:
            super().begin_step(policy, step)
            mark()

        def end_step(self, policy: str, version: int) -> Any:
            values = super().end_step(policy, version)
            mark()
            return values

    recording.Recorder = Marked  # type: ignore[misc]
    sums = [
        {"id": str(a), "prompt": f"{a}+{a}=", "answer": str(2 * a)[::-1]} for a in range(10, 99)
    ]
    paceline.train(
        model,
        sums,
        "exact",
        num_steps=1,
        run={"dir": folder},
        rollout={"prompts_per_step": 48, "samples_per_prompt": 8, "sampling": {"max_tokens": 4}},
        engine={"max_batch": 384},
        checkpoint={"every": "never"},
    )
    print("@" + json.dumps(marks))


def start(model: Path) -> list[tuple[float, float]]:
    """Seconds of each phase in a fresh process: (clock, processor)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, str(model), "--child", folder, str(time.time())]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    line = next(line for line in output.splitlines() if line.startswith("@"))
    marks = [(0.0, 0.0), *map(tuple, json.loads(line[1:]))]
    return [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(marks)]


def show_imports() -> None:
    """The modules that take longest by themselves."""
    command = [sys.executable, "-X", "importtime", "-c", "import paceline.build.training"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stderr.splitlines()
    found = [line.removeprefix("import time:").split("|") for line in lines[1:] if "|" in line]
    found.sort(key=lambda cells: -int(cells[0]))
    for own, _, name in found[:25]:
        print(f"{int(own) / 1e3:8.1f} ms {name.strip()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--imports", action="store_true")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(str(options.model), options.child[0], float(options.child[1]))
        return 0
    if options.imports:
        show_imports()
    turns = [start(options.model.resolve()) for _ in range(options.turns)]
    print("| phase | seconds | of the processor |\n|---|---|---|")
    for index, name in enumerate(PHASES):
        wall, cpu = (statistics.median(turn[index][k] for turn in turns) for k in (0, 1))
        print(f"| {name} | {wall:.2f} | {cpu:.2f} |")
    total_s = statistics.median(sum(cpu for _, cpu in turn) for turn in turns)
    clock_s = statistics.median(sum(wall for wall, _ in turn) for turn in turns)
    print(f"| all | {clock_s:.2f} | {total_s:.2f} |")
    return 0 if total_s < MAX_S else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
