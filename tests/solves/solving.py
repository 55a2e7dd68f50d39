"""A small task, a model that half knows it, runs of each algorithm on it, and their bands.

The task is to write the larger of two digits twice: `47=` is answered by `77`. The warm-up imitates
a pupil who writes two digits of the question, each at random, and is right a third of the time.
What makes an answer right is in the rewards alone, save for algorithms that learn from given
answers or from a teacher.

What is measured is what is trained: the mean reward of answers sampled at temperature 1. A run is
short enough that most algorithms are still rising at its end, so that a fault which slows learning
down shows.
"""

from __future__ import annotations

import functools
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import paceline
from paceline.algorithms import ALGORITHMS
from paceline.algorithms.base import Algorithm
from paceline.build import RunResult
from paceline.config import RunFile
from paceline.models import export_model

BANDS_FILE = Path(__file__).with_name("bands.json")
LIMIT_S = 120.0
"""Most seconds of processor time that a run may take."""
PAIRS = [(a, b) for a in range(10) for b in range(10)]
MAX_TOKENS = 4
METRIC = "eval/task/reward"
QUIET = {
    "trainer.device": "cpu",
    "trainer.threads": 1,
    "observe.console": "off",
    "observe.samples": "none",
}


@dataclass(frozen=True)
class Case:
    """An algorithm with its settings, and further keys of a run file, dotted."""

    algorithm: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    num_steps: int = 30
    watched: str | None = None
    """A metric that must end below its ceiling, as a mean over the second half of the run."""

    @property
    def kind(self) -> str:
        return str(self.algorithm["kind"])

    @property
    def objective(self) -> Algorithm:
        make: Any = ALGORITHMS[self.kind]
        made: Algorithm = make(**self.algorithm)
        return made

    @property
    def lacks(self) -> str | None:
        """Why a run file can not ask for it yet."""
        if self.objective.needs_teacher and "teacher" not in RunFile.model_fields:
            return "a run file can not name a teacher yet"
        return None


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
        {
            "rollout.dynamic_sampling": True,
            "rollout.max_refills": 3,
            "rollout.overlong_penalty": 0.5,
            "rollout.overlong_window": 1,
        },
    ),
    "rloo": Case({"kind": "rloo", "kl_coef": 0.01}),
    "reinforce_pp": Case({"kind": "reinforce_pp", "kl_coef": 0.01}),
    "reinforce_pp_baseline": Case({"kind": "reinforce_pp", "baseline": "group"}),
    "gspo": Case({"kind": "gspo"}),
    "cispo": Case({"kind": "cispo"}),
    "ppo": Case(
        {"kind": "ppo", "gae_lambda": 0.95},
        {"critic.lr": 5e-3, "critic.warmup_steps": 10},
        num_steps=40,
        watched="critic/value_error",
    ),
    "distill": Case({"kind": "distill"}, watched="train/kl_teacher"),
    "distill_top_k": Case({"kind": "distill", "top_k": 4}, watched="train/kl_teacher"),
    "sft": Case({"kind": "sft"}),
}


@dataclass(frozen=True)
class Start:
    """What all runs of one seed begin with."""

    seed: int
    folder: Path
    prompts: Path
    """`prompt` and `answer`, and the answer once more as `completion`."""
    model: Path
    """The model that the pupil taught."""


@dataclass(frozen=True)
class Outcome:
    """Mean reward of sampled answers before and after, and what it cost."""

    start: float
    final: float
    seconds: float
    """Processor time."""
    watched: float | None = None

    @property
    def gain(self) -> float:
        return self.final - self.start


@dataclass(frozen=True)
class Band:
    """Where a run must end."""

    low: float
    high: float
    min_gain: float
    watched_high: float | None = None

    def problems(self, outcome: Outcome) -> list[str]:
        """What lies outside."""
        found = []
        if not self.low <= outcome.final <= self.high:
            found.append(f"reward {outcome.final:.3f} is outside {self.low} to {self.high}")
        if outcome.gain < self.min_gain:
            found.append(f"gain {outcome.gain:.3f} is below {self.min_gain}")
        if outcome.seconds > LIMIT_S:
            found.append(f"{outcome.seconds:.0f} s of processor time, allowed {LIMIT_S:.0f}")
        ceiling, watched = self.watched_high, outcome.watched
        if ceiling is not None and (watched is None or not watched <= ceiling):
            found.append(f"the watched metric is {watched}, allowed {ceiling}")
        return found


def read_bands() -> dict[str, Band]:
    """Name of the case -> band."""
    table = json.loads(BANDS_FILE.read_text())
    return {name: Band(**band) for name, band in table.items()}


def make_start(folder: Path, seed: int) -> Start:
    """Write the task into the folder, and teach a fresh model what the pupil does."""
    prompts = folder / "task.jsonl"
    right = {f"{a}{b}=": f"{max(a, b)}" * 2 for a, b in PAIRS}
    rows = [{"prompt": text, "answer": end, "completion": end} for text, end in right.items()]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pupil = [
        {"prompt": f"{a}{b}=", "completion": f"{first}{second}"}
        for a, b in PAIRS
        for first in sorted({a, b})
        for second in sorted({a, b})
    ]
    _write_model(folder / "fresh", seed)
    model = _imitate(folder / "warm-up", folder / "fresh", pupil, seed)
    return Start(seed, folder, prompts, model)


@functools.cache
def make_teacher(start: Start) -> Path:
    """A model that knows the task, made once a start."""
    rows = [json.loads(line) for line in start.prompts.read_text().splitlines()]
    return _imitate(start.folder / "teacher", start.model, rows, start.seed)


def solve(case: Case, start: Start, run_dir: Path, **settings: Any) -> Outcome:
    """Run the case from the start. settings: more keys of a run file, dotted."""
    own = {
        "run.seed": start.seed,
        "run.dir": str(run_dir.parent),
        "algorithm": case.algorithm,
        "rollout.prompts_per_step": 16,
        "rollout.samples_per_prompt": 8,
        "rollout.sampling.max_tokens": MAX_TOKENS,
        "trainer.lr": 5e-4,
        "trainer.updates_per_step": 2,
        "engine.max_batch": 128,
        "checkpoint.every": "never",
        "evals.every": case.num_steps,
        "evals.sets": [
            {"name": "task", "data": {"path": str(start.prompts)}, "samples_per_prompt": 8}
        ],
    }
    if case.objective.needs_teacher:
        own["teacher.model.path"] = str(make_teacher(start))
    began = time.process_time()
    result = paceline.train(
        start.model,
        start.prompts,
        "exact",
        num_steps=case.num_steps,
        name=run_dir.name,
        settings=QUIET | own | case.settings | settings,
    )
    seconds = time.process_time() - began
    watched = None if case.watched is None else _late_mean(result, case.watched)
    return Outcome(result.first_evals[METRIC], result.evals[METRIC], seconds, watched)


def _imitate(run_dir: Path, model: Path, rows: list[dict[str, str]], seed: int) -> Path:
    """Supervised training on the rows; returns the folder of the model."""
    num_steps = 150
    settings = {
        "run.seed": seed,
        "run.dir": str(run_dir.parent),
        "rollout.prompts_per_step": 64,
        "trainer.lr": 5e-3,
        "trainer.lr_schedule": "linear",
        "trainer.lr_warmup_steps": 5,
        "checkpoint.every": num_steps,
    }
    result = paceline.sft(
        model, rows, num_steps=num_steps, name=run_dir.name, settings=QUIET | settings
    )
    assert result.model_path is not None
    return result.model_path


def _late_mean(result: RunResult, metric: str) -> float:
    """Mean over the rows of the run's second half."""
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    late = [row[metric] for row in rows if row["step"] > result.step / 2]
    return float(sum(late) / len(late))


def _write_model(folder: Path, seed: int) -> None:
    """About 17 thousand random parameters, and a tokenizer of one token per character."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789="])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        # About 1/sqrt(hidden_size): from the default of 0.02 so narrow a model learns late.
        initializer_range=0.15,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        export_model(LlamaForCausalLM(config), tokenizer, folder)
