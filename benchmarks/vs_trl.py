"""Paceline against TRL's GRPOTrainer: step by step in turns, and both against the floor.

Same model, prompts, reward, batch, sampling, optimizer and thread count. Each system runs in a
process of its own that waits between its steps, so that both meet the same neighbours; times are
seconds of processor time, which a busy neighbour does not change, and of the clock, which counts on
a GPU. A third process
does the bare work on the tokens that Paceline has just learned from: decoding them with a plain
key-value cache, and one padded forward and backward with a sum of log-probs for a loss.

    python benchmarks/vs_trl.py quickstart MODEL [--steps 10] [--trl PYTHON] [--folder FOLDER]
    python benchmarks/vs_trl.py smollm2 MODEL --steps 3
    python benchmarks/vs_trl.py smollm2-cuda MODEL --no-floor --option trainer.compile=true

MODEL: the warm-up's model of `examples/quickstart.py`, or what `prepare.py` of
`examples/smollm2_reasoning_gym` writes. PYTHON: of an environment with TRL; made in
FOLDER (default: a temporary one) if absent. The figures stand in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PACKAGES = ("trl==1.16.0", "torch==2.13.0", "transformers==5.24.0", "datasets", "accelerate")
SECONDS = ("cpu_s", "wall_s")


@dataclass(frozen=True, slots=True)
class Task:
    """What both systems do in a step."""

    prompts: int
    samples: int
    max_tokens: int
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    clip_high: float = 0.28
    device: str = "cpu"
    """On a GPU both learn from float32 weights in bfloat16."""

    @property
    def measure(self) -> str:
        """Which seconds are compared."""
        return "cpu_s" if self.device == "cpu" else "wall_s"


TASKS = {
    "quickstart": Task(prompts=48, samples=8, max_tokens=6, lr=5e-4),
    "smollm2": Task(prompts=4, samples=4, max_tokens=32, lr=1e-6),
    "smollm2-cuda": Task(prompts=64, samples=8, max_tokens=128, lr=1e-6, device="cuda"),
}


class Worker:
    """One system in a process of its own; it does one step for each line that it is sent."""

    def __init__(self, python: Path, role: str, options: argparse.Namespace, folder: Path) -> None:
        command = [python, HERE / f"vs_trl_{role}.py", options.task, options.model.resolve()]
        command += [str(options.steps + options.warm_up), str(folder), str(options.threads)]
        extra = [f"{option}" for option in options.option]
        self.name = role
        self._process = subprocess.Popen(
            [*map(str, command), *(extra if role == "paceline" else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(options.threads), "PYTHONHASHSEED": "0"},
        )

    def step(self, message: str = "go") -> dict[str, Any]:
        """Let it do one step; returns what it measured. Ends with an error if the worker did."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(message + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("@"):
                return dict(json.loads(line[1:]))
        raise SystemExit(f"{self.name} ended with code {self._process.wait()}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def environment(folder: Path) -> Path:
    """The Python of an environment with TRL in the folder, made on the first call."""
    python = folder / "trl" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder / "trl"], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def median(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def report(found: dict[str, list[dict[str, Any]]], measure: str) -> None:
    """Medians over the steps; ratios are of step by step in turns."""
    own, trl, floor = found["paceline"], found.get("trl"), found.get("floor", [])
    print("\n| what | paceline | trl | floor |\n|---|---|---|---|")
    names = ("cpu_s", "wall_s", "collect_s", "learn_s", "decode_s", "tokens_per_s", "peak_mib")
    for name in names:
        cells = [
            f"{median(rows, name):.3g}" if rows and name in rows[0] else "-"
            for rows in (own, trl or [], floor)
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    for name in ("reward", "tokens"):
        of_trl = f"{statistics.fmean(r[name] for r in trl):.4g}" if trl else "-"
        print(f"| {name}, mean | {statistics.fmean(r[name] for r in own):.4g} | {of_trl} | - |")
    phases = [(measure, measure), ("learn_s", "learn_s"), ("collect_s", "decode_s")]
    for name, of_floor in phases if floor else []:
        ratio = statistics.median(a[name] / b[of_floor] for a, b in zip(own, floor, strict=True))
        print(f"{name}: {ratio:.2f} times the floor of the plain work")
    if trl:
        faster = statistics.median(a[measure] / b[measure] for a, b in zip(trl, own, strict=True))
        print(f"paceline makes {faster:.2f} times TRL's steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=2, help="first steps that are not counted")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-floor", action="store_true", help="leave the bare work out")
    parser.add_argument("--trl", type=Path, help="Python of an environment with TRL, or `none`")
    parser.add_argument("--folder", type=Path, help="for the environment and the runs")
    parser.add_argument(
        "--option", action="append", default=[], help="a key of the run file: trainer.lr=1e-5"
    )
    options = parser.parse_args()
    measure = TASKS[options.task].measure
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        workers = [Worker(Path(sys.executable), "paceline", options, Path(temporary))]
        if not options.no_floor:
            workers.append(Worker(Path(sys.executable), "floor", options, Path(temporary)))
        if str(options.trl) != "none":
            python = options.trl or environment(folder)
            workers.append(Worker(python, "trl", options, Path(temporary)))
        found: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
        try:
            for turn in range(options.steps + options.warm_up):
                for worker in workers:
                    message = json.dumps(found["paceline"][-1]) if worker.name == "floor" else "go"
                    found[worker.name].append(worker.step(message))
                newest = {name: round(rows[-1][measure], 3) for name, rows in found.items()}
                print(turn, newest, flush=True)
        finally:
            for worker in workers:
                worker.close()
    report({name: rows[options.warm_up :] for name, rows in found.items()}, measure)


if __name__ == "__main__":
    main()
