"""A real run in a folder: three tiny steps, with every checkpoint kept."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny import tiny_model, tiny_tokenizer

from paceline.build import train
from paceline.config import load_run_file
from paceline.observe.samples import compress

RUN_FILE = """
[run]
name = "demo"
num_steps = 3
seed = 5
[model]
path = "model"
[[data.sources]]
path = "prompts.jsonl"
id_key = "id"
[reward]
kind = "regex"
pattern = "[0-4]"
[rollout]
prompts_per_step = 3
samples_per_prompt = 4
sampling = { max_tokens = 6 }
[trainer]
lr = 0.01
threads = 1
[checkpoint]
every = 1
keep_last = 9
[observe]
console = "off"
"""

REWARDS = """
def score(completion, num_tokens):
    return len(completion) + 0.1 * num_tokens

def fails_at_times(completion, answer):
    return None if "a" in completion else len(set(completion)) - answer

async def twice(prompt, actors):
    (actor,) = actors.values()
    first = await actor(prompt)
    second = await actor("0" + prompt.text)
    return float(len(set(first.text + second.text)))
"""


def train_run(folder: Path, *overrides: str, text: str = RUN_FILE, **given: Any) -> Path:
    """Train; returns the folder of the run. given: what Python hands over."""
    model = tiny_model(seed=1)
    model.save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    rows = [
        {"id": f"add-{i}", "prompt": f"{i}+{i}=", "completion": str(2 * i), "answer": 2 * i}
        for i in range(9)
    ]
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "run.toml"
    path.write_text(text)
    run_file = load_run_file(path, overrides, given=given)
    train(run_file, **given)
    return run_file.run_dir


def rewrite_samples(
    run_dir: Path, step: int, change: Callable[[list[dict[str, Any]]], Any]
) -> None:
    """Change the samples that a step left."""
    path = run_dir / "samples" / f"step-{step:06d}.jsonl.gz"
    items = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    change(items)
    path.write_bytes(compress("".join(json.dumps(item) + "\n" for item in items).encode()))


def rewrite_row(run_dir: Path, step: int, **changes: float) -> None:
    """Change numbers in a row of the metrics; `train__loss` stands for `train/loss`."""
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["step"] == step:
            row.update({name.replace("__", "/"): value for name, value in changes.items()})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
