"""A small task, a model that half knows it, and one run of an algorithm on it.

The task is to write the larger of two digits twice: `47=` is answered by `77`. The warm-up imitates
a pupil who writes two digits of the question, each at random, and is right a third of the time.
What makes an answer right is in the rewards alone: no algorithm sees it elsewhere, save those that
learn from given answers or from a teacher.

What is measured is what is trained: the mean reward of answers sampled at temperature 1.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

import paceline
from paceline.build import RunResult

WARM_UP_STEPS, WARM_UP_ROWS = 150, 64
MAX_TOKENS = 4
METRIC = "eval/task/reward"
PAIRS = [(a, b) for a in range(10) for b in range(10)]


@dataclass(frozen=True)
class Case:
    """An algorithm with settings, and how many steps it gets."""

    algorithm: dict[str, Any]
    num_steps: int = 60
    settings: dict[str, Any] = field(default_factory=dict)
    """Further keys of a run file, dotted."""

    @property
    def kind(self) -> str:
        return str(self.algorithm["kind"])


CASES: dict[str, Case] = {
    "grpo": Case({"kind": "grpo"}),
    "dr_grpo": Case(
        {
            "kind": "grpo",
            "normalize": "none",
            "loss_mean": "constant",
            "constant_tokens": MAX_TOKENS,
        }
    ),
    "dapo": Case(
        {"kind": "grpo", "clip_high": 0.28},
        settings={
            "rollout.dynamic_sampling": True,
            "rollout.overlong_penalty": 0.5,
            "rollout.overlong_window": 1,
        },
    ),
    "rloo": Case({"kind": "rloo"}),
    "reinforce_pp": Case({"kind": "reinforce_pp"}),
    "reinforce_pp_baseline": Case({"kind": "reinforce_pp", "baseline": "group"}),
    "gspo": Case({"kind": "gspo"}),
    "cispo": Case({"kind": "cispo"}),
    "ppo": Case(
        {"kind": "ppo", "gae_lambda": 0.95},
        settings={"critic.lr": 3e-3},
    ),
    "sft": Case({"kind": "sft"}),
}
"""Name -> case."""


@dataclass(frozen=True)
class Outcome:
    """Mean reward of sampled answers before and after."""

    start: float
    final: float
    seconds: float
    """Processor time."""

    @property
    def gain(self) -> float:
        return self.final - self.start


def make_start(folder: Path, seed: int) -> Path:
    """The data of the task, and the model that the pupil taught; returns the model's folder."""
    _write_model(folder / "fresh", seed)
    rows = [{"prompt": f"{a}{b}=", "answer": f"{max(a, b)}" * 2} for a, b in PAIRS]
    _write_rows(folder / "task.jsonl", rows)
    _write_rows(folder / "right.jsonl", [row | {"completion": row["answer"]} for row in rows])
    pupil = [
        {"prompt": f"{a}{b}=", "completion": f"{first}{second}"}
        for a, b in PAIRS
        for first in sorted({a, b})
        for second in sorted({a, b})
    ]
    result = paceline.sft(
        folder / "fresh",
        pupil,
        num_steps=WARM_UP_STEPS,
        name="warm-up",
        settings={
            "run.dir": str(folder / "runs"),
            "run.seed": seed,
            "rollout.prompts_per_step": WARM_UP_ROWS,
            "trainer.lr": 5e-3,
            "trainer.lr_schedule": "linear",
            "trainer.lr_warmup_steps": 5,
            "trainer.device": "cpu",
            "trainer.threads": 1,
            "checkpoint.every": WARM_UP_STEPS,
            "observe.console": "off",
            "observe.samples": "none",
        },
    )
    assert result.model_path is not None
    return result.model_path


def solve(
    case: Case, folder: Path, model: Path, seed: int, name: str, **settings: Any
) -> tuple[Outcome, RunResult]:
    """One run of the case from `model`, with the data that `make_start` wrote into `folder`."""
    data = "right.jsonl" if case.kind == "sft" else "task.jsonl"
    began = time.process_time()
    result = paceline.train(
        model,
        folder / data,
        "exact",
        num_steps=case.num_steps,
        name=name,
        settings={
            "run.dir": str(folder / "runs"),
            "run.seed": seed,
            "algorithm": case.algorithm,
            "rollout.prompts_per_step": 16,
            "rollout.samples_per_prompt": 8,
            "rollout.sampling.max_tokens": MAX_TOKENS,
            "trainer.lr": 2e-3,
            "trainer.updates_per_step": 2,
            "trainer.device": "cpu",
            "trainer.threads": 1,
            "engine.max_batch": 128,
            "checkpoint.every": "never",
            "observe.console": "off",
            "observe.samples": "none",
            "evals.every": case.num_steps,
            "evals.sets": [
                {
                    "name": "task",
                    "data": {"path": str(folder / "task.jsonl")},
                    "samples_per_prompt": 8,
                }
            ],
            **case.settings,
            **settings,
        },
    )
    seconds = time.process_time() - began
    return Outcome(result.first_evals[METRIC], result.evals[METRIC], seconds), result


def _write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_model(folder: Path, seed: int) -> None:
    """About 20 thousand random parameters, and a tokenizer of one token per character."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789="])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        initializer_range=0.15,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
