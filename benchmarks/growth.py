"""How a step grows with its work: batch, answer length and model, 2, 4 and 8 times as large.

    python benchmarks/growth.py            # a table: processor time and memory over the work
    python benchmarks/growth.py long       # 200 steps: memory at the 20th and at the last

Each size runs in a process of its own: three steps of GRPO on random weights (sample, learn,
publish), the last two counted. Work is counted in multiply-adds of the model: each prompt and each
answer's tokens once, and three times for training. `over`: how much faster than the work the time
grows; memory is what a process holds above its start.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from real_parts import write_model, write_prompts
from transformers import AutoConfig

from paceline.build import train
from paceline.config import load_settings
from paceline.drivers import steps

BASE = {"prompts": 8, "answers": 8, "length": 32, "layers": 2}
FACTORS = (1, 2, 4, 8)
HIDDEN = 128


def one(size: dict[str, int], num_steps: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", "tiny")
        config = AutoConfig.from_pretrained(folder / "model")
        config.num_hidden_layers, config.hidden_size = size["layers"], HIDDEN
        config.intermediate_size, config.head_dim = 4 * HIDDEN, HIDDEN // config.num_attention_heads
        config.save_pretrained(folder / "model")
        prompts = write_prompts(folder, config.vocab_size, size["prompts"] * num_steps)
        run_file = load_settings(
            {
                "run.dir": str(folder / "runs"),
                "run.num_steps": num_steps,
                "model.path": str(folder / "model"),
                "model.random_init": True,
                "data.path": str(prompts),
                "reward.kind": "regex",
                "reward.pattern": "[13579]$",
                "rollout.prompts_per_step": size["prompts"],
                "rollout.samples_per_prompt": size["answers"],
                "rollout.sampling.max_tokens": size["length"],
                "rollout.sampling.ignore_eos": True,
                "engine.max_batch": size["prompts"] * size["answers"],
                "trainer.threads": 1,
                "observe.console": "off",
                "checkpoint.every": "never",
            }
        )
        times, memory = [], []
        finish = steps.finish_step

        def timed(run: Any, step: int) -> None:
            finish(run, step)
            times.append(time.process_time())
            memory.append(held_mib())

        steps.finish_step = timed
        before = held_mib()
        train(run_file)
    seconds = (times[-1] - times[0]) / (len(times) - 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "peak": peak - before, "memory": memory}))


def held_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure(size: dict[str, int], num_steps: int = 3) -> dict[str, Any]:
    command = [sys.executable, __file__, "one", json.dumps(size), "--steps", str(num_steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def work_of(size: dict[str, int]) -> float:
    vocab, block = 512 * HIDDEN, 16 * HIDDEN**2
    tokens = size["prompts"] * (50 + size["answers"] * size["length"])
    attention = 2 * HIDDEN * (50 + size["length"]) / 2
    return 4.0 * tokens * (vocab + size["layers"] * (block + attention))


def table() -> None:
    for name, key in (("batch", "prompts"), ("answer length", "length"), ("layers", "layers")):
        first: dict[str, float] = {}
        for factor in FACTORS:
            size = BASE | {key: BASE[key] * factor}
            found = measure(size)
            now = {"work": work_of(size), "seconds": found["seconds"], "peak": found["peak"]}
            first = first or now
            ratios = {what: round(now[what] / first[what], 2) for what in now}
            over = round(ratios["seconds"] / ratios["work"], 2)
            print(json.dumps({"what": name, "factor": factor, **ratios, "over": over,
                              "step_s": round(now["seconds"], 3), "mib": round(now["peak"])}),
                  flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", default="table", choices=["table", "long", "one"])
    parser.add_argument("size", nargs="?", default="{}")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    if options.part == "one":
        one(json.loads(options.size), options.steps)
    elif options.part == "long":
        memory = measure(BASE | {"length": 8}, options.steps)["memory"]
        print(json.dumps({"steps": len(memory), "mib at 20": memory[19], "mib at end": memory[-1]}))
    else:
        table()


if __name__ == "__main__":
    main()
