"""How long a step is stopped by a checkpoint, written before the step goes on or in the background.

    python benchmarks/saves.py [--model quickstart | 100m] [--repeats 3]

Runs of the whole program on random models, which save every fourth step; in turns with
`checkpoint.background` off and on. `stopped`: `time/save_s` of the rows, the median over all saves
but the last of a run, which is never in the background. `a bare copy`: of as many bytes as weights
and moments have, into new memory. `durable after`: from the copies to the commit
(`time/save_background_s`). `processor`: seconds of all threads over whole runs, by step; those that
writing takes are there either way. Fails if a save in the background stops a step for as long.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import paceline

SIZES: dict[str, dict[str, int]] = {
    "quickstart": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3},
    "100m": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 11},
}
BATCH = {"quickstart": (48, 8), "100m": (2, 4)}
EVERY, STEPS = 4, 10


def make_model(folder: Path, size: str) -> int:
    """A random model with a tokenizer of characters; returns the number of its parameters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    words = {token: i for i, token in enumerate(["<pad>", "<eos>", *"0123456789+= "])}
    tokenizer = Tokenizer(models.WordLevel(words, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(AutoTokenizer.from_pretrained(folder)),
            num_attention_heads=4,
            num_key_value_heads=4,
            pad_token_id=0,
            eos_token_id=1,
            tie_word_embeddings=True,
            **SIZES[size],
        )
    )
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def rows_of(folder: Path, size: str, *, background: bool) -> list[dict[str, Any]]:
    """One run; the rows of its steps."""
    prompts, answers = BATCH[size]
    data = [{"prompt": f"{a}+{a}=", "answer": str(2 * a), "id": str(a)} for a in range(10, 99)]
    result = paceline.train(
        folder / size,
        data,
        num_steps=STEPS,
        name=f"background-{background}",
        run={"dir": str(folder / "runs")},
        settings={"reward.kind": "regex", "reward.pattern": "[0-4]"},
        rollout={
            "prompts_per_step": prompts,
            "samples_per_prompt": answers,
            "sampling": {"max_tokens": 6},
        },
        trainer={"lr": 1e-5, "threads": 1},
        checkpoint={"every": EVERY, "background": background},
        observe={"console": "off"},
    )
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    shutil.rmtree(result.run_dir)
    return [json.loads(line) for line in lines]


def copy_s(num_parameters: int) -> float:
    """Seconds of a copy of so many weights and their two moments, in pieces of a layer's size."""
    parts = [torch.ones(min(num_parameters, 1 << 22)) for _ in range(max(1, num_parameters >> 22))]
    taken_s = []
    for _ in range(3):
        began_s = time.perf_counter()
        copies = [part.clone() for part in parts for _ in range(3)]
        taken_s.append(time.perf_counter() - began_s)
        del copies
    return statistics.median(taken_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(SIZES), action="append")
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    for size in asked.model or ["quickstart", "100m"]:
        with tempfile.TemporaryDirectory() as name:
            measure(Path(name), size, asked.repeats)


def measure(folder: Path, size: str, repeats: int) -> None:
    count = make_model(folder / size, size)
    stopped: dict[bool, list[float]] = {False: [], True: []}
    busy_s = {False: 0.0, True: 0.0}
    durable: list[float] = []
    for _ in range(repeats):
        for background in (False, True):
            began_s = time.process_time()
            rows = rows_of(folder, size, background=background)
            busy_s[background] += (time.process_time() - began_s) / STEPS / repeats
            stopped[background] += [r["time/save_s"] for r in rows[:-1] if "time/save_s" in r]
            durable += [r["time/save_background_s"] for r in rows if "time/save_background_s" in r]
    before, now = (statistics.median(stopped[way]) for way in (False, True))
    print(
        f"{size} ({count / 1e6:.1f} M parameters): stopped {before:.4f} s before, {now:.4f} s in "
        f"the background, 1/{before / now:.1f} (a bare copy: {copy_s(count):.4f} s)\n"
        f"  durable after {statistics.median(durable):.3f} s; processor {busy_s[False]:.3f} s a "
        f"step before, {busy_s[True]:.3f} s in the background",
        flush=True,
    )
    if now >= before:
        raise SystemExit("a save in the background stops a step for as long")


if __name__ == "__main__":
    main()
