"""The quickstart's task by PPO: accuracy on held-out sums before and after, and the time it took.

    python benchmarks/ppo_quickstart.py [--seeds 3] [--folder runs/benchmark-ppo]

One CPU thread. The critic starts from the policy's own weights with a head of zeros, and learns
alone for five steps. Fails unless every seed starts at 0.45 or below, gains 0.30 or more, and takes
at most two minutes of processor time after the warm-up. The figures stand in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import paceline
from paceline.build import RunResult

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import quickstart

MAX_BEFORE, MIN_GAIN, MAX_MINUTES = 0.45, 0.30, 2.0
NUM_STEPS, CRITIC_ONLY_STEPS = 60, 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """One seed."""

    seed: int
    before: float
    after: float
    explained: float
    """Most of the returns' variance that the critic explained in a step."""
    minutes: float
    """Processor time of the PPO run, evals and checkpoints included."""

    @property
    def is_good(self) -> bool:
        gain = self.after - self.before
        return self.before <= MAX_BEFORE and gain >= MIN_GAIN and self.minutes <= MAX_MINUTES


def warm_up(folder: Path, seed: int) -> RunResult:
    """That of the quickstart."""
    train, _ = quickstart.make_prompts(seed)
    quickstart.make_model(folder / "start", seed)
    return paceline.sft(
        folder / "start",
        quickstart.careless_rows(train, seed),
        num_steps=quickstart.WARM_UP_STEPS,
        name="warm-up",
        run={"dir": str(folder), "seed": seed},
        rollout={"prompts_per_step": quickstart.WARM_UP_ROWS},
        trainer={
            "lr": 2e-3,
            "betas": [0.9, 0.95],
            "lr_schedule": "cosine",
            "lr_warmup_steps": 40,
            "threads": 1,
        },
        checkpoint={"every": quickstart.WARM_UP_STEPS},
        observe={"samples": "none", "console": "off"},
    )


def run(folder: Path, seed: int) -> Outcome:
    """A fresh warm-up, then PPO."""
    folder = folder / f"seed-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    warm = warm_up(folder, seed)
    train, held_out = quickstart.make_prompts(seed)
    assert warm.model_path is not None
    began_s = time.process_time()
    result = paceline.train(
        warm.model_path,
        train,
        "exact",
        num_steps=NUM_STEPS,
        eval_prompts=held_out,
        name="ppo",
        run={"dir": str(folder), "seed": seed},
        rollout={"prompts_per_step": 48, "samples_per_prompt": 8, "sampling": {"max_tokens": 4}},
        algorithm={"kind": "ppo"},
        critic={"lr": 1e-3, "warmup_steps": CRITIC_ONLY_STEPS},
        trainer={
            "lr": 5e-4,
            "betas": [0.9, 0.95],
            "lr_schedule": "cosine",
            "lr_warmup_steps": 10,
            "threads": 1,
        },
        engine={"max_batch": 384},
        evals={"every": 20},
        checkpoint={"every": 20},
        observe={"samples": "none", "console": "off"},
    )
    minutes = (time.process_time() - began_s) / 60
    rows = [json.loads(line) for line in (folder / "ppo/metrics.jsonl").open()]
    explained = max(row.get("critic/explained_variance", 0.0) for row in rows)
    before, after = result.first_evals["eval/eval/reward"], result.evals["eval/eval/reward"]
    return Outcome(seed, before, after, explained, minutes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-ppo"))
    options = parser.parse_args()
    outcomes = []
    print("| seed | before | after | gain | explained | minutes |\n|---|---|---|---|---|---|")
    for seed in range(options.seeds):
        one = run(options.folder, seed)
        outcomes.append(one)
        print(
            f"| {seed} | {one.before:.3f} | {one.after:.3f} | {one.after - one.before:+.3f} "
            f"| {one.explained:.2f} | {one.minutes:.2f} |",
            flush=True,
        )
    return 0 if all(one.is_good for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
