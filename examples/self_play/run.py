"""A player learns a game by playing against its own earlier selves; an Elo table tells how far.

The game: some matches are left; whose turn it is takes 1, 2 or 3 of them; who takes the last one
wins. `17:` is answered by `1`, which leaves a multiple of four: that is how to win. The warm-up
only teaches what a move looks like. A copy of the player joins its opponents every 20 steps; the
run itself is in run.toml.

    python examples/self_play/run.py [--seed N] [--folder FOLDER] [KEY=VALUE]...
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

import paceline

HERE = Path(__file__).absolute().parent
TRAIN_COMMAND = (sys.executable, "-m", "paceline", "train", str(HERE / "run.toml"))
sys.path.insert(0, str(HERE.parent))
from quickstart import make_model  # noqa: E402

MOST, MOVES = 21, ("1", "2", "3")
WARM_UP_STEPS, WARM_UP_ROWS = 60, 64


async def play(prompt, actors):
    """One game. Who says anything but a possible move has lost."""
    left, turn = int(prompt.text), prompt.metadata["first"]
    while left > 0:
        other = "opponent" if turn == "player" else "player"
        said = (await actors[turn](f"{left}:")).text
        left = left - int(said) if said in MOVES else -1
        winner, turn = (turn if left >= 0 else other), other
    return {"player": float(winner == "player"), "opponent": float(winner == "opponent")}


def games():
    """How many matches there are, and who begins."""
    for left in range(4, MOST + 1):
        for first in ("player", "opponent"):
            yield {"id": f"{left}-{first}", "prompt": str(left), "first": first}


def possible_moves(rng):
    """Moves at random, for the warm-up."""
    for i in range(WARM_UP_STEPS * WARM_UP_ROWS):
        left = rng.randint(1, MOST)
        move = rng.choice([move for move in MOVES if int(move) <= left])
        yield {"id": f"move-{i}", "prompt": f"{left}:", "completion": move}


def show(run, model):
    """The ratings, and how often the player finds the winning move."""
    table = Table("player", "rating", "games", title="Elo ratings")
    for row in json.loads((run / "elo-opponent.json").read_text()):
        table.add_row(row["player"], f"{row['rating']:.0f}", str(row["games"]))
    Console().print(table)
    positions = [left for left in range(1, MOST + 1) if left % 4]
    texts = [f"{left}:" for left in positions]
    moves = paceline.generate(model, texts, max_tokens=2, temperature=0)
    found = sum(move == str(left % 4) for left, move in zip(positions, moves, strict=True))
    print(f"The player makes the winning move in {found} of the {len(positions)} that have one.")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/self_play"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="over run.toml")
    given = parser.parse_args()
    folder = given.folder.absolute() / f"seed-{given.seed}"
    make_model(folder / "start", given.seed, "0123456789:")
    warm = paceline.sft(
        folder / "start",
        possible_moves(random.Random(given.seed)),
        num_steps=WARM_UP_STEPS,
        name="warm-up",
        run={"dir": str(folder), "seed": given.seed},
        rollout={"prompts_per_step": WARM_UP_ROWS},
        trainer={"lr": 1e-3, "lr_warmup_steps": 10},
        observe={"samples": "none"},
    )
    changes = [f"run.seed={given.seed}", f"run.dir={folder}", f"model.path={warm.model_path}"]
    code = subprocess.run([*TRAIN_COMMAND, *changes, *given.overrides]).returncode
    run = folder / "self-play"
    if code == 0:
        newest = max((run / "checkpoints").glob("step-*"))
        show(run, newest / "policies/player/model")
    return code


if __name__ == "__main__":
    sys.exit(main())
