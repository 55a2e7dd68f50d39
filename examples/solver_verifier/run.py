"""Solver and verifier, both trained in one run, from one model that was warmed up on both jobs.

The solver adds two-digit numbers, units first: `47+38=` is answered by `58`. The verifier is shown
two answers to the sum, the solver's and another one, of which one is right and one is wrong. It
adds by itself and says `y` or `n`: `47+38=58?` is answered by `58y`. Only the verdict counts, and
who always says the same earns a half. Both start equally careless: they mostly forget to carry. The
run itself is in run.toml; the sums of the evals are never trained on.

    python examples/solver_verifier/run.py [--seed N] [--folder FOLDER] [KEY=VALUE]...
"""

import argparse
import random
import subprocess
import sys
from pathlib import Path

import paceline

HERE = Path(__file__).absolute().parent
TRAIN_COMMAND = (sys.executable, "-m", "paceline", "train", str(HERE / "run.toml"))
sys.path.insert(0, str(HERE.parent))
from quickstart import make_model, make_prompts  # noqa: E402

CARELESS = 0.8  # share of the sums that are added, or checked, without carrying
WARM_UP_STEPS, WARM_UP_ROWS = 400, 224
TRAIN, HELD_OUT = make_prompts(seed=0)  # sums with their answers; run.toml names them too


async def play(prompt, actors):
    """The environment: the solver answers, the verifier judges that answer and another one."""
    answer = (await actors["solver"](prompt)).text
    is_right = answer == prompt.answer
    other = wrong_answer(prompt.text, random.Random(prompt.id)) if is_right else prompt.answer
    of_answer = (await actors["of_answer"](f"{prompt.text}{answer}?")).text
    of_other = (await actors["of_other"](f"{prompt.text}{other}?")).text
    return {
        "solver": float(is_right),
        "of_answer": verdict_is_right(of_answer, "y" if is_right else "n"),
        "of_other": verdict_is_right(of_other, "n" if is_right else "y"),
    }


def verdict_is_right(completion, answer):
    return float(completion[-1:] == answer)


def answers_held_out():
    """Answers to the held-out sums, half of them right."""
    return [
        {"prompt": text, "answer": "y" if answer == add(problem, True) else "n"}
        for text, problem, answer in judged(HELD_OUT, random.Random(0))
    ]


def add(text, carries):
    """The digits of a sum such as `47+38=`, units first; or what they are without carrying."""
    digits, carry = "", 0
    for x, y in ((text[1], text[4]), (text[0], text[3])):
        carry, digit = divmod(int(x) + int(y) + carry, 10)
        digits += str(digit)
        carry *= carries
    return digits + "1" * carry


def wrong_answer(text, rng):
    """Half of the time, where it is wrong, what one gets without carrying; else a digit is off."""
    right, careless = add(text, True), add(text, False)
    if careless != right and rng.random() < 0.5:
        return careless
    at = rng.randrange(2)
    return right[:at] + str((int(right[at]) + rng.randrange(1, 10)) % 10) + right[at + 1 :]


def judged(prompts, rng):
    """A right and a wrong answer by turns: (what the verifier is asked, the sum, the answer)."""
    for number, prompt in enumerate(prompts):
        answer = wrong_answer(prompt.text, rng) if number % 2 else add(prompt.text, True)
        yield f"{prompt.text}{answer}?", prompt.text, answer


def warm_up_rows(rng):
    """Both jobs, done by somebody who carries in few of the sums; four solved for three judged."""
    count = WARM_UP_STEPS * WARM_UP_ROWS // 7
    for i, prompt in enumerate(rng.choices(TRAIN, k=4 * count)):
        says = add(prompt.text, carries=rng.random() >= CARELESS)
        yield {"id": f"solve-{i}", "prompt": prompt.text, "completion": says}
    for i, (text, problem, answer) in enumerate(judged(rng.choices(TRAIN, k=3 * count), rng)):
        finds = add(problem, carries=rng.random() >= CARELESS)
        verdict = finds + ("y" if answer == finds else "n")
        yield {"id": f"judge-{i}", "prompt": text, "completion": verdict}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/solver_verifier"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="over run.toml")
    given = parser.parse_args()
    folder = given.folder.absolute() / f"seed-{given.seed}"
    make_model(folder / "start", given.seed, "0123456789+=?yn")
    warm = paceline.sft(
        folder / "start",
        warm_up_rows(random.Random(given.seed)),
        num_steps=WARM_UP_STEPS,
        name="warm-up",
        run={"dir": str(folder), "seed": given.seed},
        rollout={"prompts_per_step": WARM_UP_ROWS},
        trainer={"lr": 2e-3, "betas": [0.9, 0.95], "lr_schedule": "cosine", "lr_warmup_steps": 40},
        observe={"samples": "none"},
    )
    changes = [f"run.seed={given.seed}", f"run.dir={folder}", f"model.path={warm.model_path}"]
    return subprocess.run([*TRAIN_COMMAND, *changes, *given.overrides]).returncode


if __name__ == "__main__":
    sys.exit(main())
