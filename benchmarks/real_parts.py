"""Whole runs over real parts, measured: step time by phase, publish, memory, against bare ceilings.

    python benchmarks/real_parts.py run [--shape smollm2] [--set engine.kind=sglang ...]
    python benchmarks/real_parts.py rollout [--shape smollm2] [--set engine.kind=sglang ...]

`run`: GRPO of random weights, 64 prompts of 50 tokens x 8 answers of 128, a few steps: seconds of
each phase (median of all but the first two steps), samples a second, peak memory, the share of a
step that is none of sampling, learning and publishing, and bytes a second of a publish beside those
of a plain copy on the same device.

`rollout`: the same requests through the engine, and as one HTTP request to the bare server.

Prints one JSON object a line. `--set` takes keys of the run file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from on_gpu import SHAPES, ceilings
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from paceline.build import train
from paceline.build.engines import open_engine, transport_of
from paceline.build.parts import make_model, make_text
from paceline.build.site import open_site
from paceline.config import RunFile, load_settings
from paceline.drivers.dispose import Disposer
from paceline.engines.base import Request, Sampling
from paceline.models import blank_model
from paceline.types import derive_seed

NUM_PROMPTS, NUM_ANSWERS, PROMPT, ANSWER = 64, 8, 50, 128
WARM_UP = 2


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def write_model(folder: Path, shape: str) -> None:
    """Configuration and tokenizer; the weights are drawn when they are loaded."""
    size = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=size["vocab"],
        hidden_size=size["hidden"],
        intermediate_size=size["inner"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv"],
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    words = {f"w{i}": i for i in range(size["vocab"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", eos_token="w1", unk_token="w2"
    ).save_pretrained(folder)


def write_prompts(folder: Path, vocab: int, count: int) -> Path:
    rng = np.random.default_rng(0)
    path = folder / "prompts.jsonl"
    with path.open("w") as file:
        for _ in range(count):
            text = " ".join(f"w{i}" for i in rng.integers(3, vocab, PROMPT))
            file.write(json.dumps({"prompt": text, "answer": ""}) + "\n")
    return path


def settings(folder: Path, options: argparse.Namespace) -> RunFile:
    write_model(folder / "model", options.shape)
    vocab = SHAPES[options.shape]["vocab"]
    small = not torch.cuda.is_available()
    prompts = 4 if small else NUM_PROMPTS
    values = {
        "run.dir": str(folder / "runs"),
        "run.num_steps": options.steps,
        "model.path": str(folder / "model"),
        "model.random_init": True,
        "data.path": str(write_prompts(folder, vocab, prompts * options.steps)),
        "reward.kind": "regex",
        "reward.pattern": "[13579]$",
        "rollout.prompts_per_step": prompts,
        "rollout.samples_per_prompt": NUM_ANSWERS,
        "rollout.sampling.max_tokens": 16 if small else ANSWER,
        "rollout.sampling.ignore_eos": True,
        "trainer.autocast": "bfloat16",
        "trainer.max_tokens_per_micro_batch": 32768,
        "trainer.logprob_chunk_tokens": 8192,
        "observe.console": "off",
        "checkpoint.every": "never",
    }
    given = dict(item.split("=", 1) for item in options.set)
    return load_settings(values | {key: _value(text) for key, text in given.items()})


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def measure_run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        run_file = settings(Path(name), options)
        found = ceilings("cuda" if torch.cuda.is_available() else "cpu")
        start = time.perf_counter()
        result = train(run_file)
        seconds = time.perf_counter() - start
        lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
        size = _bytes_of(run_file)
    rows = [json.loads(line) for line in lines][WARM_UP:]
    names = sorted({key for row in rows for key in row if key.startswith(("time/", "perf/"))})
    phases = {n: round(statistics.median(r[n] for r in rows if n in r), 5) for n in names}

    step = phases["time/step_s"]
    busy = sum(phases.get(f"time/{part}_s", 0.0) for part in ("collect", "learn", "publish"))
    samples = run_file.rollout.prompts_per_step * NUM_ANSWERS
    tell(
        what="run", shape=options.shape, settings=options.set, seconds=round(seconds, 1),
        steps=len(rows), step_s=step, samples_s=round(samples / step, 1), phases=phases,
        rest_share=round(1 - busy / step, 4), weights_gb=size / 1e9,
        publish_gb_s=round(size / phases["time/publish_s"] / 1e9, 2),
        copy_gb_s=round(found["bytes_s"] / 2e9, 1),
        mismatch=max(row.get("train/mismatch_max", 0.0) for row in rows),
    )  # fmt: skip


def _bytes_of(run_file: RunFile) -> int:
    """What one publish moves."""
    dtype = getattr(run_file.engine, "dtype", "model")
    held = run_file.model.dtype if dtype == "model" else dtype
    model = blank_model(run_file.located_model)
    return sum(p.numel() for p in model.parameters()) * int(getattr(torch, held).itemsize)


async def measure_rollout(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        run_file = settings(Path(name), options)
        async with Disposer() as disposer:
            model = make_model(run_file)
            text = make_text(run_file, model)
            engine = await open_engine(
                run_file, model, text, await open_site(run_file, disposer, learns=False),
                policy="policy", transport=transport_of(run_file),
            )  # fmt: skip
            sampling = run_file.rollout.sampling
            for turn in range(4):
                prompts = _prompts(run_file, turn)
                await _through(engine, prompts, sampling, turn)
                await _bare(engine, prompts, sampling, turn)


def _prompts(run_file: RunFile, turn: int) -> list[list[int]]:
    rng = np.random.default_rng(turn)
    count = run_file.rollout.prompts_per_step
    return [rng.integers(3, 400, PROMPT).tolist() for _ in range(count) for _ in range(NUM_ANSWERS)]


async def _through(engine: Any, prompts: list[list[int]], sampling: Sampling, turn: int) -> None:
    requests = [
        Request(tokens, sampling, derive_seed(turn, i), group=str(i // NUM_ANSWERS))
        for i, tokens in enumerate(prompts)
    ]
    start = time.perf_counter()
    answers = await asyncio.gather(*(engine.generate(request) for request in requests))
    seconds = time.perf_counter() - start
    count = sum(len(answer.tokens) for answer in answers)
    tell(what="through the engine", tokens=count, seconds=seconds, tokens_s=count / seconds)


async def _bare(engine: Any, prompts: list[list[int]], sampling: Sampling, turn: int) -> None:
    import urllib.request

    body = {
        "input_ids": prompts,
        "sampling_params": {"max_new_tokens": sampling.max_tokens, "ignore_eos": True},
        "return_logprob": True,
    }
    url = engine.addresses[0] + "/generate"
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    start = time.perf_counter()
    answer = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(request)))
    seconds = time.perf_counter() - start
    count = sum(one["meta_info"]["completion_tokens"] for one in answer)
    tell(what="bare server", tokens=count, seconds=seconds, tokens_s=count / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["run", "rollout"])
    parser.add_argument("--shape", choices=list(SHAPES), default="smollm2")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the run file")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    if options.part == "run":
        measure_run(options)
    else:
        asyncio.run(measure_rollout(options))


if __name__ == "__main__":
    main()
