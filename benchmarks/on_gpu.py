"""The embedded engine and the trainer on one GPU, against bare ceilings of the same machine.

    python benchmarks/on_gpu.py engine [--shape smollm2|1.5b] [--generate]
    python benchmarks/on_gpu.py trainer [--shape smollm2|1.5b] [--set compile=true ...]
    python benchmarks/on_gpu.py step [--shape smollm2] [--set compile=true ...]

`engine`: 64 prompts of 50 tokens, 8 answers each, 128 tokens an answer (and, as `uneven`, 16 to
128): tokens a second with and without captured graphs, milliseconds of a decode step, and the
share of the memory bandwidth that reading the weights and the keys and values once would take.
`--generate` runs `transformers.generate` on the same prompts beside it.

`trainer`: one optimizer step of GRPO on rows of 4,096 tokens (SmolLM2: 8,192 positions): model
FLOPs utilisation with 6 x parameters + 6 x layers x hidden x length FLOPs a token (causal
attention), against the bfloat16 matmul rate that the machine itself shows.

`step`: a whole step of 64 prompts x 8 answers of 16 to 128 tokens, the trainer in float32 with
bfloat16 autocast, the engine with a bfloat16 copy: publish, sample, learn.

Weights are random. Prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.algorithms import ALGORITHMS
from paceline.engines.base import EmbeddedEngineConfig, Request, Sampling
from paceline.engines.embedded import EmbeddedEngine
from paceline.trainers.base import SingleTrainerConfig
from paceline.trainers.single import SingleTrainer
from paceline.types import Batch, Row, derive_seed
from paceline.weights.base import WeightPlan
from paceline.weights.publish import publish

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 64, "inner": 128, "layers": 2, "heads": 4, "kv": 2, "vocab": 512},
    "smollm2": {"hidden": 576, "inner": 1536, "layers": 30, "heads": 9, "kv": 3, "vocab": 49152},
    "1.5b": {"hidden": 1536, "inner": 8960, "layers": 28, "heads": 12, "kv": 2, "vocab": 151936},
}
NUM_PROMPTS, NUM_ANSWERS, PROMPT, ANSWER = 64, 8, 50, 128


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def make_model(shape: str, dtype: torch.dtype, device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=size["vocab"],
        hidden_size=size["hidden"],
        intermediate_size=size["inner"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv"],
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_time(work: Callable[[], object], turns: int = 5) -> float:
    times = []
    for _ in range(turns):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def ceilings(device: str) -> dict[str, float]:
    """Bytes a second of a large copy (read and written), and FLOPs a second of a large matmul."""
    is_gpu = device == "cuda"
    n = 2**28 if is_gpu else 2**22
    source, target = torch.empty(n, device=device), torch.empty(n, device=device)
    seconds = median_time(lambda: target.copy_(source))
    side = 8192 if is_gpu else 512
    one = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        one @ one
    matmul = median_time(lambda: [one @ one for _ in range(10)]) / 10
    return {"bytes_s": 2 * source.nbytes / seconds, "flops_s": 2 * side**3 / matmul}


def limits(uneven: bool) -> list[int]:
    rng = np.random.default_rng(1)
    count = NUM_PROMPTS * NUM_ANSWERS
    return rng.integers(16, ANSWER + 1, count).tolist() if uneven else [ANSWER] * count


async def answer_all(engine: EmbeddedEngine, prompts: list[list[int]], uneven: bool) -> int:
    ends = limits(uneven)
    requests = [
        Request(
            prompts[p],
            Sampling(max_tokens=ends[p * NUM_ANSWERS + i], ignore_eos=True),
            derive_seed(0, p, i),
            group=str(p),
        )
        for p in range(NUM_PROMPTS)
        for i in range(NUM_ANSWERS)
    ]
    answers = await asyncio.gather(*(engine.generate(request) for request in requests))
    return sum(len(answer.tokens) for answer in answers)


async def measure_engine(shape: str, device: str, with_generate: bool) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = make_model(shape, dtype, device)
    found = ceilings(device)
    rng = np.random.default_rng(0)
    vocab = SHAPES[shape]["vocab"]
    prompts = [rng.integers(2, vocab, PROMPT).tolist() for _ in range(NUM_PROMPTS)]
    kv = 2 * SHAPES[shape]["layers"] * SHAPES[shape]["kv"]
    kv *= SHAPES[shape]["hidden"] // SHAPES[shape]["heads"] * dtype.itemsize
    weights = sum(p.nbytes for p in model.parameters())
    for graphs in (True, False):
        config = EmbeddedEngineConfig(max_batch=512, max_context=256, graphs=graphs)
        engine = EmbeddedEngine(config, model, None, policy="p", eos_token_ids=frozenset({1}))
        for uneven in (False, True):
            turns = []
            for _ in range(4 if graphs else 2):
                steps = engine.counts.decode_steps
                synchronize()
                start = time.perf_counter()
                tokens = await answer_all(engine, prompts, uneven)
                synchronize()
                turns.append(time.perf_counter() - start)
                steps = engine.counts.decode_steps - steps
            best = statistics.median(turns[1:])
            rows = tokens / steps
            floor = weights + rows * (PROMPT + ANSWER / 2) * kv
            floor_s = steps * floor / (found["bytes_s"] / 2)
            tell(
                what="engine", shape=shape, graphs=graphs, uneven=uneven, tokens=tokens,
                seconds=turns, tokens_s=tokens / best, step_ms=1000 * best / steps,
                bandwidth_share=floor_s / best,
            )  # fmt: skip
        await engine.aclose()
    if with_generate:
        for uneven in (False, True):
            seconds = []
            for _ in range(2):
                synchronize()
                start = time.perf_counter()
                rows = torch.tensor([p for p in prompts for _ in range(NUM_ANSWERS)], device=device)
                model.generate(
                    rows, attention_mask=torch.ones_like(rows), do_sample=True, temperature=1.0,
                    top_k=0, max_new_tokens=ANSWER, min_new_tokens=ANSWER,
                )  # fmt: skip
                synchronize()
                seconds.append(time.perf_counter() - start)
            tokens = sum(limits(uneven))  # beyond its own end an answer is of no use
            rate = tokens / min(seconds)
            tell(what="generate", shape=shape, uneven=uneven, seconds=seconds, tokens_s=rate)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    tell(what="ceilings", shape=shape, peak_gib=memory, **found)


def make_batch(rows: int, length: int, vocab: int) -> Batch:
    rng = np.random.default_rng(0)
    made = []
    for index in range(rows):
        mask = np.zeros(length, bool)
        mask[length // 8 :] = True
        column = np.where(mask, -1.0, 0.0).astype(np.float32)
        made.append(
            Row(
                tokens_T=rng.integers(2, vocab, length),
                mask_T=mask,
                weights_T=np.where(mask, 1.0 / rows / mask.sum(), 0.0).astype(np.float32),
                advantages_T=np.where(mask, 1.0 - 2.0 * (index % 2), 0.0).astype(np.float32),
                behaviour_logprobs_T=column,
                episode=(f"p{index}", 0),
            )
        )
    return Batch("p", made)


async def measure_trainer(shape: str, device: str, settings: dict[str, Any]) -> None:
    found = ceilings(device)
    length = 4096 if device == "cuda" else 64
    rows = 16 if device == "cuda" else 2
    model = make_model(shape, torch.float32, device)
    config = SingleTrainerConfig(lr=1e-6, autocast="bfloat16", device=device, **settings)
    trainer = SingleTrainer(config, model, None, ALGORITHMS["grpo"](), horizon=100)
    batch = make_batch(rows, length, SHAPES[shape]["vocab"])
    size = SHAPES[shape]
    count = sum(p.numel() for p in model.parameters())
    flops = 6 * count + 6 * size["layers"] * size["hidden"] * length
    times, forwards = [], []
    for _ in range(4):
        synchronize()
        start = time.perf_counter()
        await trainer.forward_backward(batch)
        await trainer.optim_step()
        synchronize()
        times.append(time.perf_counter() - start)
        start = time.perf_counter()
        await trainer.forward(batch.rows, "policy")
        synchronize()
        forwards.append(time.perf_counter() - start)
    best = statistics.median(times[1:])
    memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    tell(
        what="trainer", shape=shape, settings=settings, parameters=count, length=length, rows=rows,
        seconds=times, tokens_s=rows * length / best, peak_gib=memory,
        mfu=flops * rows * length / best / found["flops_s"],
        forward_share=statistics.median(forwards[1:]) / best, **found,
    )  # fmt: skip
    await trainer.aclose()


def make_rows(requests: list[Request], answers: list[Any]) -> list[Row]:
    total = sum(len(answer.tokens) for answer in answers)
    rows = []
    for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        tokens = np.array([*request.tokens, *answer.tokens])
        mask = np.arange(len(tokens)) >= len(request.tokens)
        column = np.zeros(len(tokens), np.float32)
        column[mask] = answer.logprobs
        rows.append(
            Row(
                tokens_T=tokens,
                mask_T=mask,
                weights_T=np.where(mask, 1.0 / total, 0.0).astype(np.float32),
                advantages_T=np.where(mask, 1.0 - 2.0 * (index % 2), 0.0).astype(np.float32),
                behaviour_logprobs_T=column,
                episode=(f"p{index // NUM_ANSWERS}", index % NUM_ANSWERS),
            )
        )
    return rows


async def measure_step(shape: str, device: str, settings: dict[str, Any], turns: int = 8) -> None:
    model = make_model(shape, torch.float32, device)
    config = EmbeddedEngineConfig(
        max_batch=512, max_context=256, weights="copy",
        dtype="bfloat16" if device == "cuda" else "model",
    )  # fmt: skip
    engine = EmbeddedEngine(config, model, None, policy="p", eos_token_ids=frozenset({1}))
    budget = {"max_tokens_per_micro_batch": 32768, "logprob_chunk_tokens": 8192}
    trainer = SingleTrainer(
        SingleTrainerConfig(lr=1e-6, autocast="bfloat16", device=device, **{**budget, **settings}),
        model, None, ALGORITHMS["grpo"](), horizon=100,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    vocab = SHAPES[shape]["vocab"]
    prompts = [rng.integers(2, vocab, PROMPT).tolist() for _ in range(NUM_PROMPTS)]
    for turn in range(turns):
        times = [time.perf_counter()]

        def mark(times: list[float] = times) -> None:
            synchronize()
            times.append(time.perf_counter())

        await publish(trainer, {"engine": engine}, WeightPlan("p", turn, "copy"))
        mark()
        requests = list(uneven_requests(prompts, turn))
        answers = await asyncio.gather(*(engine.generate(request) for request in requests))
        mark()
        rows = make_rows(requests, answers)
        await trainer.forward_backward(Batch("p", rows))
        await trainer.optim_step()
        mark()
        parts = dict(zip(("publish_s", "sample_s", "learn_s"), np.diff(times), strict=True))
        memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
        tokens = sum(len(answer.tokens) for answer in answers)
        tell(what="step", shape=shape, settings=settings, turn=turn, tokens=tokens,
             step_s=times[-1] - times[0], peak_gib=memory, **parts)  # fmt: skip
    await engine.aclose()
    await trainer.aclose()


def uneven_requests(prompts: list[list[int]], turn: int) -> Iterator[Request]:
    for index, length in enumerate(limits(uneven=True)):
        prompt, answer = divmod(index, NUM_ANSWERS)
        sampling = Sampling(max_tokens=length, ignore_eos=True)
        seed = derive_seed(turn, prompt, answer)
        yield Request(prompts[prompt], sampling, seed, group=str(prompt))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["engine", "trainer", "step"])
    parser.add_argument("--shape", choices=list(SHAPES), default="smollm2")
    parser.add_argument("--generate", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of [trainer]")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = {k: json.loads(v) for k, _, v in (item.partition("=") for item in options.set)}
    if options.part == "engine":
        asyncio.run(measure_engine(options.shape, device, options.generate))
    elif options.part == "step":
        asyncio.run(measure_step(options.shape, device, settings))
    else:
        asyncio.run(measure_trainer(options.shape, device, settings))


if __name__ == "__main__":
    main()
