"""Speed of the embedded engine against `transformers.generate`: alternating, in one process.

A random Llama of 0.85 M parameters (hidden 128, 4 layers, vocabulary 512) answers 64 prompts of 16
to 48 tokens 8 times each, at temperature 1. A set of end tokens makes lengths uneven: mean about
40, at most 256. `generate` takes left-padded batches of 64 or of all 512 rows; it returns no
log-probs, the engine does. Rates are per second of the process's CPU time, which a busy neighbour
does not change; on an idle core it is the time on the clock.

    OMP_NUM_THREADS=1 python benchmarks/embedded_vs_generate.py

Two shared cores, one thread, torch 2.13, transformers 5.24, float32, median of 5 turns:

| what | tokens/s | against the best `generate` |
|---|---|---|
| generate, 64 rows | 1018 | 1.00 x |
| generate, 512 rows | 800 | 0.79 x |
| engine, max_batch 64 | 4965 | 4.88 x |
| engine, max_batch 128 | 6687 | 6.57 x |
| engine, max_batch 256 | 8236 | 8.09 x |
| engine, max_batch 512 | 9218 | 9.06 x |
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.engines.base import EmbeddedEngineConfig, Request, Sampling
from paceline.engines.embedded import EmbeddedEngine
from paceline.types import derive_seed

NUM_PROMPTS, NUM_ANSWERS = 64, 8
MAX_TOKENS = 256
VOCAB = 512
END_IDS = list(range(1, 14))


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=END_IDS,
    )
    return LlamaForCausalLM(config).eval()


def make_prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(20, VOCAB, rng.integers(16, 49)).tolist() for _ in range(NUM_PROMPTS)]


def run_generate(model: LlamaForCausalLM, prompts: list[list[int]], size: int) -> int:
    rows = [prompt for prompt in prompts for _ in range(NUM_ANSWERS)]
    num_tokens = 0
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        longest = max(map(len, part))
        output = model.generate(
            torch.tensor([[0] * (longest - len(row)) + row for row in part]),
            attention_mask=torch.tensor(
                [[0] * (longest - len(row)) + [1] * len(row) for row in part]
            ),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=MAX_TOKENS,
        )
        num_tokens += int((output[:, longest:] != 0).sum())
    return num_tokens


async def run_engine(engine: EmbeddedEngine, prompts: list[list[int]], turn: int) -> int:
    sampling = Sampling(max_tokens=MAX_TOKENS)
    answers = await asyncio.gather(
        *(
            engine.generate(Request(prompt, sampling, derive_seed(turn, p, i), group=str(p)))
            for p, prompt in enumerate(prompts)
            for i in range(NUM_ANSWERS)
        )
    )
    return sum(len(answer.tokens) for answer in answers)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--max-batch", type=int, nargs="+", default=[64, 128, 256, 512])
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, prompts = make_model(), make_prompts()
    engines = {
        size: EmbeddedEngine(
            EmbeddedEngineConfig(max_batch=size),
            model,
            None,
            policy="policy",
            eos_token_ids=frozenset(END_IDS),
        )
        for size in options.max_batch
    }
    rates: dict[str, list[float]] = {}
    for turn in range(options.turns):
        for size in (64, 512):
            start = time.process_time()
            num_tokens = run_generate(model, prompts, size)
            rate = num_tokens / (time.process_time() - start)
            rates.setdefault(f"generate, {size} rows", []).append(rate)
        for size, engine in engines.items():
            start = time.process_time()
            num_tokens = await run_engine(engine, prompts, turn)
            rate = num_tokens / (time.process_time() - start)
            rates.setdefault(f"engine, max_batch {size}", []).append(rate)
        print(turn, {name: round(values[-1]) for name, values in rates.items()}, flush=True)
    for engine in engines.values():
        await engine.aclose()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max(rate for name, rate in medians.items() if name.startswith("generate"))
    print("| what | tokens/s | against the best `generate` |\n|---|---|---|")
    for name, rate in medians.items():
        print(f"| {name} | {rate:.0f} | {rate / best:.2f} x |")


if __name__ == "__main__":
    asyncio.run(main())
