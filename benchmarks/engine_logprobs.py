"""What an engine says of its tokens, against what the trainer says of the same ones.

    python benchmarks/engine_logprobs.py [--engine embedded] [--dtype float32] [--shape smollm2]
    python benchmarks/engine_logprobs.py --engine sglang --python .venv-sglang/bin/python \\
        [--dtype bfloat16] [--env PYTHONPATH=...] [--model FOLDER] [--trainer fsdp]

The trainer's weights are published to the engine, which answers at temperature 1; the trainer
computes the log-probs of the answers' tokens from the same weights. Prints one JSON object: the
mean and the largest difference, and the estimate of the divergence that a run sees (k3). Fails if
the engine does not hold what was sent.

float32: both compute in it. bfloat16: the engine holds and computes in it; the trainer holds
float32 and computes in it (`trainer.autocast`). Right numbers are those of rounding, and of kernels
that add in another order; a wrong temperature or wrong weights make a mean of 0.1 and more.

Without `--model` weights are random, with an output layer that is scaled so that next tokens are
about as uncertain as a trained model's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from on_gpu import SHAPES
from real_parts import write_model, write_prompts
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.build.parts import make_model, make_text
from paceline.build.policies import open_policy
from paceline.build.site import open_site
from paceline.config import RunFile, load_settings
from paceline.drivers.dispose import Disposer
from paceline.engines.base import Completion, Request, Sampling
from paceline.types import Row

PROMPT = 50
SCALE = 5.0
"""Of the output layer of random weights: logits then spread by about 2.4."""


def settings(folder: Path, options: argparse.Namespace) -> RunFile:
    model = options.model or write_random(folder / "model", options.shape)
    values: dict[str, Any] = {
        "run.dir": str(folder / "runs"),
        "run.num_steps": 1,
        "model.path": str(model),
        "model.dtype": "float32",
        "data.path": str(write_prompts(folder, 100, 1)),
        "reward.kind": "regex",
        "reward.pattern": "[13579]$",
        "trainer.kind": options.trainer,
        "trainer.autocast": "off" if options.dtype == "float32" else "bfloat16",
        "trainer.device": options.device,
        "engine.kind": options.engine,
        "weight_check.when": "always",
        "weight_check.tolerance": 0.0 if options.dtype == "float32" else 0.004,
    }
    if options.engine == "embedded":
        values |= {"engine.dtype": options.dtype, "engine.weights": "copy"}
    else:
        values |= {"engine.dtype": options.dtype, "engine.device": options.device}
        values["engine.env"] = dict(item.split("=", 1) for item in options.env)
        if options.python:
            values["engine.python"] = options.python
    values |= {key: _value(text) for key, text in (i.split("=", 1) for i in options.set)}
    return load_settings(values)


def write_random(folder: Path, shape: str) -> Path:
    write_model(folder, shape)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(SCALE)
    model.save_pretrained(folder)
    return folder


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        run_file = settings(Path(name), options)
        async with Disposer() as disposer:
            model = make_model(run_file)
            text = make_text(run_file, model)
            site = await open_site(run_file, disposer)
            policy = await open_policy(run_file, model, None, text, 1, site)
            await policy.publish()
            sampling = Sampling(max_tokens=options.tokens, ignore_eos=True)
            rng = np.random.default_rng(0)
            vocab = min(model.config.vocab_size, 40_000)
            asked = [
                Request(rng.integers(3, vocab, PROMPT).tolist(), sampling, seed=i)
                for i in range(options.answers)
            ]
            # ends: each by the time limit of its engine
            made = await asyncio.gather(*(policy.engine.generate(one) for one in asked))
            rows = [_row(one, answer) for one, answer in zip(asked, made, strict=True)]
            scored = await policy.trainer.forward(rows, "policy")
    gap = np.concatenate(
        [
            (found_T - row.behaviour_logprobs_T)[row.mask_T]
            for row, found_T in zip(rows, scored, strict=True)
        ]
    )
    spread = np.concatenate([row.behaviour_logprobs_T[row.mask_T] for row in rows])
    on_gpu = torch.cuda.is_available() and options.device != "cpu"
    return {
        "engine": options.engine,
        "trainer": options.trainer,
        "dtype": options.dtype,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "model": options.model or options.shape,
        "tokens": len(gap),
        "mean": float(np.abs(gap).mean()),
        "largest": float(np.abs(gap).max()),
        "k3": float((np.expm1(gap) - gap).mean()),
        "mean_logprob": float(spread.mean()),
    }


def _row(asked: Request, made: Completion) -> Row:
    tokens_T = np.array([*asked.tokens, *made.tokens])
    mask_T = np.arange(len(tokens_T)) >= len(asked.tokens)
    logprobs_T = np.concatenate([np.zeros(len(asked.tokens)), made.logprobs])
    zeros_T = np.zeros(len(tokens_T))
    return Row(tokens_T, mask_T, zeros_T, zeros_T, logprobs_T)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=["embedded", "sglang", "vllm"], default="embedded")
    parser.add_argument("--trainer", choices=["single", "fsdp"], default="single")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--shape", choices=list(SHAPES), default="smollm2")
    parser.add_argument("--model", help="a folder with weights, in the place of random ones")
    parser.add_argument("--answers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--python", help="interpreter of the server's environment")
    parser.add_argument("--env", nargs="*", default=[], metavar="NAME=VALUE", help="of the server")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the run file")
    print(json.dumps(asyncio.run(measure(parser.parse_args()))), flush=True)


if __name__ == "__main__":
    main()
