"""A proposer writes problems, a solver solves them, and each learns from what the other can do.

The proposer is given `47+` and goes on with a second number, `38`; the solver adds, units first:
`58`. Four answers to each problem are asked for. Each earns one if it is right; the proposer earns
most where half of them are right: what is too easy or too hard teaches nothing. The warm-up is the
work of a teacher who asks for few sums with a carry, and of a pupil who mostly forgets to carry.
The run itself is in run.toml.

    python examples/proposer_solver/run.py [--seed N] [--folder FOLDER] [KEY=VALUE]...
"""

import argparse
import json
import random
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

import paceline
from paceline.rollout.env import Outcome

HERE = Path(__file__).absolute().parent
TRAIN_COMMAND = (sys.executable, "-m", "paceline", "train", str(HERE / "run.toml"))
sys.path.insert(0, str(HERE.parent))
from quickstart import careless_rows, make_model, make_prompts  # noqa: E402

WARM_UP_STEPS, WARM_UP_ROWS = 400, 144  # of which every eighth row is a proposal
TRAIN, HELD_OUT = make_prompts(seed=0)  # the latter for the evals
SOLVERS = ("solver_1", "solver_2", "solver_3", "solver_4")


async def play(prompt, actors):
    """The environment. What is no problem is not asked, and earns nothing."""
    problem = prompt.text + (await actors["proposer"](prompt)).text + "="
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


def first_numbers():
    return [f"{number}+" for number in range(10, 100)]


def warm_up_rows(seed):
    """Both jobs, done as they should not be."""
    rng, count = random.Random(seed), WARM_UP_STEPS * WARM_UP_ROWS // 8
    for row in careless_rows(TRAIN, seed, 7 * count):
        yield {"id": row.id, "prompt": row.text, **row.metadata}
    for i in range(count):
        first, is_easy = rng.randint(10, 99), rng.random() < 0.8
        fitting = [n for n in range(10, 100) if carries(f"{first}+{n}=") != is_easy]
        second = rng.choice(fitting or range(10, 100))
        yield {"id": f"propose-{i}", "prompt": f"{first}+", "completion": f"{second}="}


def show(run):
    """What the proposer asked for, in the first step and in the last one."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["policy"] == "proposer"]
    table = Table("problems", "first step", "last step", title="What the proposer writes")
    for what in ("valid", "carries"):
        first, last = (row[f"rollout/env/{what}"] for row in (rows[0], rows[-1]))
        table.add_row(what, f"{first:.1%}", f"{last:.1%}")
    Console().print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/proposer_solver"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="over run.toml")
    given = parser.parse_args()
    folder = given.folder.absolute() / f"seed-{given.seed}"
    make_model(folder / "start", given.seed)
    warm = paceline.sft(
        folder / "start",
        warm_up_rows(given.seed),
        num_steps=WARM_UP_STEPS,
        name="warm-up",
        run={"dir": str(folder), "seed": given.seed},
        rollout={"prompts_per_step": WARM_UP_ROWS},
        trainer={"lr": 2e-3, "betas": [0.9, 0.95], "lr_schedule": "cosine", "lr_warmup_steps": 40},
        observe={"samples": "none"},
    )
    changes = [f"run.seed={given.seed}", f"run.dir={folder}", f"model.path={warm.model_path}"]
    code = subprocess.run([*TRAIN_COMMAND, *changes, *given.overrides]).returncode
    if code == 0:
        show(folder / "proposer-solver")
    return code


if __name__ == "__main__":
    sys.exit(main())
