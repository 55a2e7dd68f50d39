"""A player learns a game by playing against its own earlier selves, and an Elo table tells how far.

The game: some matches are left; whose turn it is takes 1, 2 or 3 of them; who takes the last one
wins. `17:` is answered by `1`, which leaves a multiple of four: the way to win. The warm-up only
teaches what a move looks like. A copy of the player joins the pool of opponents every 20 steps.

    python examples/self_play/run.py [--seed N] [--folder runs/self_play]
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
from quickstart import make_model

MOST, MOVES = 21, ("1", "2", "3")
WARM_UP_STEPS, WARM_UP_ROWS = 60, 64


async def play(prompt, actors):
    """One game. Who says anything but a possible move has lost."""
    left, turn = int(prompt.metadata["matches"]), prompt.metadata["first"]
    while left > 0:
        other = "opponent" if turn == "player" else "player"
        said = (await actors[turn](f"{left}:")).text
        left = left - int(said) if said in MOVES else -1
        winner, turn = (turn if left >= 0 else other), other
    return {"player": float(winner == "player"), "opponent": float(winner == "opponent")}


def possible_moves(rng):
    """Moves at random, for the warm-up."""
    for i in range(WARM_UP_STEPS * WARM_UP_ROWS):
        left = rng.randint(1, MOST)
        move = rng.choice([move for move in MOVES if int(move) <= left])
        yield {"id": f"move-{i}", "prompt": f"{left}:", "completion": move}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/self_play"))
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    start_s, folder = time.monotonic(), options.folder / f"seed-{options.seed}"
    run = {"dir": str(folder), "seed": options.seed}
    make_model(folder / "start", options.seed, "0123456789:")
    warm = paceline.sft(
        folder / "start",
        possible_moves(random.Random(options.seed)),
        num_steps=WARM_UP_STEPS,
        name="warm-up",
        run=run,
        rollout={"prompts_per_step": WARM_UP_ROWS},
        trainer={"lr": 1e-3, "lr_warmup_steps": 10},
        observe={"samples": "none"},
    )
    games = [
        {"id": f"{left}-{first}", "prompt": f"{left}:", "matches": left, "first": first}
        for left in range(4, MOST + 1)
        for first in ("player", "opponent")
    ]
    result = paceline.train(
        warm.model_path,
        games,
        num_steps=options.steps,
        name="games",
        run=run,
        rollout={
            "env": f"{Path(__file__).absolute()}:play",
            "prompts_per_step": 24,
            "samples_per_prompt": 8,
            "sampling": {"max_tokens": 2},
        },
        policies={"player": {}},
        roles={"player": "player", "opponent": {"past": "player", "every": 20, "keep": 10}},
        trainer={"lr": 5e-4, "lr_warmup_steps": 5},
        engine={"max_batch": 256},
        checkpoint={"every": 50},
    )
    table = Table("player", "rating", "games", title="Elo: the player and its earlier selves")
    for row in json.loads((result.run_dir / "elo-opponent.json").read_text()):
        table.add_row(row["player"], f"{row['rating']:.0f}", str(row["games"]))
    Console().print(table)
    positions = [left for left in range(1, MOST + 1) if left % 4]
    moves = paceline.generate(
        result.model_path, [f"{left}:" for left in positions], max_tokens=2, temperature=0
    )
    best = sum(move == str(left % 4) for left, move in zip(positions, moves, strict=True))
    print(f"The winning move in {best} of {len(positions)} positions that have one.")
    print(f"{(time.monotonic() - start_s) / 60:.1f} minutes. The player: {result.model_path}")


if __name__ == "__main__":
    main()
