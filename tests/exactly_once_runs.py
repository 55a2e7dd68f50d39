"""Kills a pipelined run at random moments until it ends, and prints its books.

    python exactly_once_runs.py FOLDER MOST_KILLS SEED... [--drops]

A moment is the begin of a phase, an operation on files, or a decode step of the engine in its own
thread. Every process is a forked child, which kills itself with SIGKILL. After each death, and at
the end, the ledger is checked against the newest checkpoint. `--drops`: groups with equal rewards
are dropped, and the prompts count as used.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny import tiny_model, tiny_tokenizer

from paceline.build import train
from paceline.cli.ledger import read_accounts
from paceline.config import load_run_file
from paceline.engines.embedded_batch import Batch
from paceline.observe.files import Files
from paceline.observe.recorder import Recorder

NUM_PROMPTS, NUM_EPOCHS = 10, 4
RUN_FILE = """
[run]
name = "{name}"
num_epochs = {num_epochs}
seed = 5
[model]
path = "model"
[[data.sources]]
path = "prompts.jsonl"
id_key = "id"
[reward]
kind = "regex"
pattern = "[0-4]"
workers = 1
[rollout]
prompts_per_step = 3
samples_per_prompt = 2
sampling = {{ max_tokens = 24 }}
dynamic_sampling = {drops}
[algorithm]
correction.high = 2.0
[trainer]
lr = 0.01
threads = 1
[checkpoint]
every = 2
[schedule]
max_staleness = 2
pause = "{pause}"
[observe]
console = "off"
samples = "none"
"""


class Doom:
    """Ends this process at its n-th moment."""

    def __init__(self, at: int) -> None:
        self._left = at
        self._lock = threading.Lock()

    def before(self, owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def watched(*given: Any, **options: Any) -> Any:
            with self._lock:
                self._left -= 1
                if self._left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*given, **options)

        setattr(owner, name, watched)


def in_child(file: Path, kill_at: int) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            doom = Doom(kill_at)
            doom.before(Batch, "_step")
            doom.before(Recorder, "phase")
            for name in ("make_folder", "write", "append", "sync", "rename", "remove_tree"):
                doom.before(Files, name)
            train(load_run_file(file, []))
            status = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def prepare(folder: Path) -> None:
    folder.mkdir(parents=True)
    tiny_model(seed=3).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    rows = [{"prompt": f"{i}+{i}=", "answer": "0", "id": f"p{i}"} for i in range(NUM_PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def books(run_dir: Path) -> dict[str, Any]:
    if not (run_dir / "ledger.jsonl").is_file():
        return {"step": 0, "violations": [], "prompts": {}}
    accounts = read_accounts(run_dir)
    if not accounts:
        return {"step": 0, "violations": [], "prompts": {}}
    (account,) = accounts
    prompts = {
        life.name: [life.committed, life.dropped.total(), len(life.versions)]
        for life in account.prompts
    }
    return {"step": account.step, "violations": account.violations, "prompts": prompts}


def torment(folder: Path, seed: int, most_kills: int, drops: bool) -> dict[str, Any]:
    """One run over all its lives."""
    rng = random.Random(seed)
    name = f"run{seed}"
    file = folder / f"{name}.toml"
    pause = rng.choice(["finish", "keep", "recompute", "abort"])
    file.write_text(
        RUN_FILE.format(name=name, num_epochs=NUM_EPOCHS, drops=str(drops).lower(), pause=pause)
    )
    run_dir = folder / "runs" / name
    statuses, violations = [], []
    while not statuses or statuses[-1] != 0:
        # Often before or in the first save that comes, now and then deep in the run.
        kill_at = rng.choice([rng.randint(1, 60), rng.randint(40, 250)])
        statuses.append(in_child(file, kill_at if len(statuses) < most_kills else 0))
        violations += books(run_dir)["violations"]
        if statuses[-1] not in (0, -signal.SIGKILL):
            break
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    starts = [e for e in map(json.loads, lines) if e["kind"] == "start" and "after_step" in e]
    return {
        "seed": seed, "pause": pause, "statuses": statuses, "violations": violations,
        "resumed_at": [event["after_step"] for event in starts], "end": books(run_dir),
    }  # fmt: skip


def main() -> None:
    folder, drops = Path(sys.argv[1]), "--drops" in sys.argv
    prepare(folder)
    most_kills, *seeds = [int(word) for word in sys.argv[2:] if word.isdecimal()]
    for seed in seeds:
        print(json.dumps(torment(folder, seed, most_kills, drops)), flush=True)


if __name__ == "__main__":
    main()
