"""Solver and verifier, both trained in one run, from one model that was warmed up on both jobs.

The solver adds two-digit numbers, units first (`47+38=` -> `58`). The verifier is shown two answers
to the sum, the solver's and another one, of which one is right and one is wrong, and says of each
`y` or `n`: so it earns a half by always saying the same. Both start as careless as each other:
they mostly forget to carry.

    python examples/solver_verifier/run.py [--seed N] [--folder runs/solver_verifier]
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import paceline

sys.path.insert(0, str(Path(__file__).parents[1]))
from quickstart import make_model, make_prompts

CARELESS = 0.8  # share of the sums that are added, or checked, without carrying
WARM_UP_STEPS, WARM_UP_ROWS = 400, 192


async def play(prompt, actors):
    """The environment: what solver and verifier earn in one episode."""
    solved = await actors["solver"](prompt)
    is_right = solved.text == prompt.answer
    other = wrong_answer(prompt.text, random.Random(prompt.id)) if is_right else prompt.answer
    verdicts = []
    for text in (solved.text, other):
        said = await actors["verifier"](f"{prompt.text}{text}?")
        verdicts.append(said.text == ("y" if text == prompt.answer else "n"))
    return {"solver": float(is_right), "verifier": sum(verdicts) / 2}


def add(text, carries):
    """The digits of a sum such as `47+38=`, units first; without carrying, as a careless pupil."""
    digits, carry = "", 0
    for x, y in ((text[1], text[4]), (text[0], text[3])):
        carry, digit = divmod(int(x) + int(y) + carry, 10)
        digits += str(digit)
        carry *= carries
    return digits + "1" * carry


def wrong_answer(text, rng):
    """What the careless pupil would say; where that is right, or at times, one digit is another."""
    right, careless = add(text, True), add(text, False)
    if careless != right and rng.random() < 0.5:
        return careless
    at = rng.randrange(2)
    return right[:at] + str((int(right[at]) + rng.randrange(1, 10)) % 10) + right[at + 1 :]


def judged(prompts, rng):
    """One right and one wrong answer by turns: (what the verifier is asked, the sum, the answer)."""
    for number, prompt in enumerate(prompts):
        answer = wrong_answer(prompt.text, rng) if number % 2 else prompt.answer
        yield f"{prompt.text}{answer}?", prompt.text, answer


def warm_up_rows(prompts, rng):
    """Both jobs, done by somebody who carries in few of the sums; two solved for each judged one."""
    for i, prompt in enumerate(rng.choices(prompts, k=WARM_UP_STEPS * WARM_UP_ROWS * 2 // 3)):
        says = add(prompt.text, carries=rng.random() >= CARELESS)
        yield {"id": f"solve-{i}", "prompt": prompt.text, "completion": says}
    chosen = rng.choices(prompts, k=WARM_UP_STEPS * WARM_UP_ROWS // 3)
    for i, (text, problem, answer) in enumerate(judged(chosen, rng)):
        finds = add(problem, carries=rng.random() >= CARELESS)
        yield {"id": f"judge-{i}", "prompt": text, "completion": "y" if answer == finds else "n"}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(path.absolute())}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/solver_verifier"))
    parser.add_argument("--steps", type=int, default=80)
    options = parser.parse_args()
    start_s, rng = time.monotonic(), random.Random(options.seed)
    folder = options.folder / f"seed-{options.seed}"
    make_model(folder / "start", options.seed, "0123456789+=?yn")
    train, held_out = make_prompts(options.seed)
    common = {"run": {"dir": str(folder), "seed": options.seed}}
    trainer = {"betas": [0.9, 0.95], "lr_schedule": "cosine", "lr_warmup_steps": 10}
    warm = paceline.sft(
        folder / "start", warm_up_rows(train, rng), num_steps=WARM_UP_STEPS, name="warm-up", **common,
        rollout={"prompts_per_step": WARM_UP_ROWS}, trainer={**trainer, "lr": 2e-3, "lr_warmup_steps": 40},
        checkpoint={"every": WARM_UP_STEPS}, observe={"samples": "none"},
    )  # fmt: skip
    right = [{"prompt": p.text, "answer": p.answer} for p in held_out]
    asked = [{"prompt": text, "answer": "y" if add(problem, True) == answer else "n"} for text, problem, answer in judged(held_out, rng)]
    alone = {"env": "single_turn", "reward": {"kind": "exact"}}
    result = paceline.train(
        warm.model_path, train, num_steps=options.steps, name="joint", **common,
        rollout={"env": f"{__file__}:play", "prompts_per_step": 32, "samples_per_prompt": 8, "sampling": {"max_tokens": 4}},
        algorithm={"clip_high": 0.28}, trainer={**trainer, "lr": 5e-4}, engine={"max_batch": 512},
        policies={"solver": {}, "verifier": {"rollout": {"sampling": {"max_tokens": 2}}}},
        evals={"every": 20, "sets": [
            {"name": "solving", "policy": "solver", "data": write(folder / "sums.jsonl", right), **alone},
            {"name": "judging", "policy": "verifier", "data": write(folder / "answers.jsonl", asked), **alone},
            {"name": "together", "policy": "verifier", "data": write(folder / "sums.jsonl", right)},
        ]},
        checkpoint={"every": 40},
    )  # fmt: skip
    table = Table("held out", "before", "after", "gain", title="Solver and verifier")
    for who, name in (("solver", "solving"), ("verifier", "judging")):
        before, after = (evals[f"eval/{name}/reward"] for evals in (result.first_evals, result.evals))
        table.add_row(f"{who}: right {name}", f"{before:.1%}", f"{after:.1%}", f"{after - before:+.1%}")
    Console().print(table)
    print(f"{(time.monotonic() - start_s) / 60:.1f} minutes. Models: {', '.join(map(str, result.model_paths.values()))}")


if __name__ == "__main__":
    main()
