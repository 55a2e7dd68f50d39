"""The framework against `examples/grpo_in_one_file.py`: the same rollouts, step by step.

The file trains first and records what it sampled and computed. The framework then gets those
token ids, masks, log-probs and rewards alone, starts from the same weights, and moves them with
its own losses, gradients, clipping, AdamW and schedule.

Both are float32 and add in different orders; the file takes the ratio to what was sampled, the
framework to its own log-probs of the same weights. Largest differences (loss, norm, weight):
4e-7, 4e-6, 1.4e-5. AdamW divides a gradient by its own size, so that one of nothing but rounding
still moves its weight: hence the tolerance of the weights is a share of the learning rate, and
their mean difference is held to a share of the mean distance gone.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from paceline.algorithms.grpo import Grpo
from paceline.observe.metrics import Metrics
from paceline.policy import Policy
from paceline.testing import FakeEngine
from paceline.trainers.base import SingleTrainerConfig
from paceline.trainers.single import SingleTrainer
from paceline.types import Batch, Episode, Group, Prompt, Sample, Status, StepReport

EXAMPLE = Path(__file__).parent.parent / "examples" / "grpo_in_one_file.py"
NUM_ROLLOUTS = 5
SETTINGS: dict[str, Any] = {
    "prompts_per_step": 8,
    "temperature": 0.9,
    "lr": 1e-4,
    "warmup_steps": 3,
    "max_grad_norm": 0.5,
}


@dataclass
class Trace:
    """What training did; one entry an optimizer step, of the advantages one a rollout."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    clip_fractions: list[float] = field(default_factory=list)
    advantages: list[torch.Tensor] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


class RecordingTrainer(SingleTrainer):
    """Keeps what `Policy.learn` gives back as means over the optimizer steps of a rollout."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.trace = Trace()
        self.num_micro_batches = 0
        self._add_micro_batch = self._core._add_micro_batch
        self._core._add_micro_batch = self._counted  # type: ignore[method-assign]

    async def forward_backward(self, batch: Batch) -> Metrics:
        metrics = await super().forward_backward(batch)
        self.trace.losses.append(metrics.values()["train/loss"])
        self.trace.clip_fractions.append(metrics.values()["train/clip_fraction"])
        return metrics

    async def optim_step(self) -> StepReport:
        report = await super().optim_step()
        self.trace.grad_norms.append(report.grad_norm)
        return report

    def _counted(self, *inputs: Any, **named: Any) -> bool:
        self.num_micro_batches += 1
        return self._add_micro_batch(*inputs, **named)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo_in_one_file", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def start(example: ModuleType) -> LlamaForCausalLM:
    """A model that solves its few problems sometimes."""
    model = example.make_model(0)
    example.sft(model, few_problems(example), seed=0, steps=25)
    return model


def few_problems(example: ModuleType) -> list[Any]:
    return example.make_prompts(0)[0][:8]


def groups_of(rollouts: Any, group_size: int, temperature: float) -> list[Group]:
    """What the framework's own rollouts would have brought: unpadded columns, and rewards."""
    groups: list[Group] = []
    width = rollouts.prompt_ids.shape[1]
    for i, (prompt_ids, completion_ids, mask, logprobs, reward) in enumerate(
        zip(
            rollouts.prompt_ids.tolist(),
            rollouts.completion_ids,
            rollouts.mask,
            rollouts.behavior_logprobs,
            rollouts.rewards.tolist(),
            strict=True,
        )
    ):
        number, index = divmod(i, group_size)
        if index == 0:
            groups.append(Group(Prompt(f"p{number}", text="?"), [], draw=number))
        answer = completion_ids[mask].tolist()
        sample = Sample(
            policy="policy",
            prompt_id=f"p{number}",
            episode=index,
            tokens=prompt_ids + answer,
            mask=[False] * width + [True] * len(answer),
            logprobs=[0.0] * width + logprobs[mask].tolist(),
            versions=[-1] * width + [0] * len(answer),
            status=Status.COMPLETED if len(answer) < len(mask) else Status.TRUNCATED,
            temperature=temperature,
            reward=reward,
        )
        groups[-1].episodes.append(Episode(f"p{number}", index, [sample]))
    return groups


def run_example(
    example: ModuleType, start: LlamaForCausalLM, config: Any
) -> tuple[Trace, list[Any]]:
    """Its trace, and the rollouts that it learned from."""
    model = copy.deepcopy(start)
    num_steps, problems = NUM_ROLLOUTS, few_problems(example)
    records = list(example.train(model, problems, config, num_steps, seed=1))
    first = records[:: config.num_iterations]
    trace = Trace(
        losses=[record.loss for record in records],
        grad_norms=[record.grad_norm for record in records],
        advantages=[record.advantages for record in first],
        weights=model.state_dict(),
    )
    return trace, [record.rollouts for record in first]


def run_framework(
    start: LlamaForCausalLM, config: Any, rollouts: list[Any], **trainer_settings: Any
) -> tuple[Trace, int]:
    """Its trace on those rollouts, and how many micro-batches it made."""
    model = copy.deepcopy(start)
    algorithm = Grpo(clip_low=config.clip_low, clip_high=config.clip_high, kl_coef=config.kl_coef)
    settings = SingleTrainerConfig(
        lr=config.lr,
        lr_warmup_steps=config.warmup_steps,
        betas=config.betas,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        device="cpu",
        **trainer_settings,
    )
    reference = copy.deepcopy(start) if algorithm.needs_reference else None
    trainer = RecordingTrainer(
        settings, model, None, algorithm, horizon=NUM_ROLLOUTS, reference=reference
    )
    policy = Policy(
        "policy",
        algorithm,
        FakeEngine(),
        trainer,
        "shared",
        epochs_per_step=config.num_iterations,
    )

    async def learn() -> None:
        for each in rollouts:
            groups = groups_of(each, config.group_size, config.temperature)
            credit, _ = await policy.learn(groups)
            of_samples = [column[-1] for column in credit.advantages]
            trainer.trace.advantages.append(torch.tensor(of_samples))
        await trainer.aclose()

    asyncio.run(learn())
    trainer.trace.weights = model.state_dict()
    return trainer.trace, trainer.num_micro_batches


CASES = [
    pytest.param({}, {}, 1, id="one-micro-batch"),
    pytest.param({}, {"max_tokens_per_micro_batch": 100}, 5, id="micro-batches"),
    pytest.param(
        {}, {"max_tokens_per_micro_batch": 100, "layout": "packed"}, 5, id="micro-batches-packed"
    ),
    pytest.param({"kl_coef": 0.1}, {"max_tokens_per_micro_batch": 100}, 5, id="kl"),
    pytest.param(
        {"num_iterations": 3, "kl_coef": 0.1},
        {"max_tokens_per_micro_batch": 100},
        5,
        id="iterations-kl",
    ),
    pytest.param(
        {"num_iterations": 3, "kl_coef": 0.1}, {"layout": "packed"}, 1, id="iterations-kl-packed"
    ),
]


@pytest.mark.parametrize(("settings", "trainer_settings", "least_micro_batches"), CASES)
def test_framework_reproduces_the_one_file_grpo(
    example: ModuleType,
    start: LlamaForCausalLM,
    settings: dict[str, Any],
    trainer_settings: dict[str, Any],
    least_micro_batches: int,
) -> None:
    config = example.GRPOConfig(**SETTINGS, **settings)
    expected, rollouts = run_example(example, start, config)
    found, num_micro_batches = run_framework(start, config, rollouts, **trainer_settings)

    num_updates = NUM_ROLLOUTS * config.num_iterations
    assert len(found.losses) == len(expected.losses) == num_updates
    assert num_micro_batches >= num_updates * least_micro_batches
    assert all(each.abs().max() > 0.1 for each in expected.advantages), "nothing is learned"
    assert max(expected.grad_norms) > config.max_grad_norm
    assert (max(found.clip_fractions) > 0) == (config.num_iterations > 1)

    for own, theirs in zip(found.advantages, expected.advantages, strict=True):
        torch.testing.assert_close(own, theirs, rtol=0, atol=1e-6)
    assert found.losses == pytest.approx(expected.losses, rel=0, abs=1e-6)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=0, abs=1e-5)
    before = start.state_dict()
    assert found.weights.keys() == expected.weights.keys()
    for name, theirs in expected.weights.items():
        gap = (found.weights[name] - theirs).abs()
        moved = (theirs - before[name]).abs()
        assert float(gap.max()) < 0.02 * config.lr, name
        assert float(gap.mean()) < 1e-4 * float(moved.mean()), name
