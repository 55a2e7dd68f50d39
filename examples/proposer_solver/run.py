"""A proposer writes problems, a solver solves them, and each learns from what the other can do.

The proposer is given `47+` and goes on with a second number, `38=`; the solver adds, units first:
`58`. Four answers to each problem are asked for. Each solver earns one if it is right; the proposer
earns most where half of them are right: what is too easy or too hard teaches nothing. The warm-up
is the work of a teacher who mostly asks for sums without a carry, and of a pupil who mostly forgets
to carry.

    python examples/proposer_solver/run.py [--seed N] [--folder runs/proposer_solver]
"""

import argparse
import json
import random
import re
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import paceline
from paceline.rollout.env import Outcome

sys.path.insert(0, str(Path(__file__).parents[1]))
from quickstart import careless_rows, make_model, make_prompts

WARM_UP_STEPS, WARM_UP_ROWS = 400, 144
SOLVERS = ("solver_1", "solver_2", "solver_3", "solver_4")  # four roles of one policy


async def play(prompt, actors):
    """The environment. What is no problem is not asked, and earns nothing."""
    problem = prompt.text + (await actors["proposer"](prompt)).text
    if not re.fullmatch(r"[1-9]\d\+[1-9]\d=", problem):
        return Outcome({"proposer": 0.0}, metrics={"valid": 0.0})
    answer = str(sum(map(int, problem[:-1].split("+"))))[::-1]
    rights = {role: float((await actors[role](problem)).text == answer) for role in SOLVERS}
    share = sum(rights.values()) / len(SOLVERS)
    told = {"valid": 1.0, "carries": float(carries(problem))}
    return Outcome({"proposer": 4 * share * (1 - share), **rights}, metrics=told)


def carries(problem):
    """True if a digit of `47+38=` has to be carried."""
    return int(problem[1]) + int(problem[4]) > 9 or int(problem[0]) + int(problem[3]) > 9


def proposals(rng):
    """Problems of the teacher: nine of ten are easy."""
    for i in range(WARM_UP_STEPS * WARM_UP_ROWS // 8):
        first, easy = rng.randint(10, 99), rng.random() < 0.9
        others = [n for n in range(10, 100) if carries(f"{first}+{n}=") != easy]
        yield {
            "id": f"propose-{i}",
            "prompt": f"{first}+",
            "completion": f"{rng.choice(others or range(10, 100))}=",
        }


def solutions(prompts, seed):
    rows = careless_rows(prompts, seed)[: WARM_UP_STEPS * WARM_UP_ROWS * 7 // 8]
    return [{"id": p.id, "prompt": p.text, "completion": p.metadata["completion"]} for p in rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/proposer_solver"))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    start_s, seed = time.monotonic(), options.seed
    folder = options.folder / f"seed-{seed}"
    run = {"dir": str(folder), "seed": seed}
    make_model(folder / "start", seed)
    train, held_out = make_prompts(seed)
    warm = paceline.sft(
        folder / "start",
        [*solutions(train, seed), *proposals(random.Random(seed))],
        num_steps=WARM_UP_STEPS,
        name="warm-up",
        run=run,
        rollout={"prompts_per_step": WARM_UP_ROWS},
        trainer={"lr": 2e-3, "betas": [0.9, 0.95], "lr_schedule": "cosine", "lr_warmup_steps": 40},
        observe={"samples": "none"},
    )
    sums = folder / "sums.jsonl"
    rows = [{"prompt": p.text, "answer": p.answer} for p in held_out]
    sums.write_text("".join(json.dumps(row) + "\n" for row in rows))
    solving = {"name": "solving", "policy": "solver", "env": "single_turn",
               "data": {"path": str(sums.absolute())}, "reward": {"kind": "exact"}}  # fmt: skip
    result = paceline.train(
        warm.model_path,
        [f"{first}+" for first in range(10, 100)],
        num_steps=options.steps,
        name="games",
        run=run,
        rollout={
            "env": f"{Path(__file__).absolute()}:play",
            "prompts_per_step": 24,
            "samples_per_prompt": 8,
            "sampling": {"max_tokens": 4},
        },
        policies={"solver": {}, "proposer": {"trainer": {"lr": 2e-4}}},
        roles={"proposer": "proposer"} | dict.fromkeys(SOLVERS, "solver"),
        trainer={"lr": 5e-4, "betas": [0.9, 0.95], "lr_warmup_steps": 10},
        engine={"max_batch": 512},
        evals={"every": 20, "sets": [solving]},
        checkpoint={"every": 20},
    )
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").open()]
    lines = [row for row in lines if row["policy"] == "proposer" and row["step"] > 0]
    table = Table("", "before", "after", title="Proposer and solver")
    before, after = (of["eval/solving/reward"] for of in (result.first_evals, result.evals))
    table.add_row("solver: right sums", f"{before:.1%}", f"{after:.1%}")
    for what in ("valid", "carries"):
        first, last = (row[f"rollout/env/{what}"] for row in (lines[0], lines[-1]))
        table.add_row(f"proposer: {what}", f"{first:.1%}", f"{last:.1%}")
    Console().print(table)
    print(f"{(time.monotonic() - start_s) / 60:.1f} minutes. Models: {folder / 'games'}")


if __name__ == "__main__":
    main()
