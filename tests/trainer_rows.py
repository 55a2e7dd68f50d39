"""Rows, a plain algorithm and small calls that the tests of trainers share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tiny import tiny_model
from transformers import PreTrainedModel

from paceline.algorithms.base import Credit, LossInputs, LossOutput, Scores
from paceline.observe.metrics import Metrics
from paceline.trainers.base import SingleTrainerConfig
from paceline.trainers.optimizer import moments
from paceline.trainers.single import SingleTrainer
from paceline.types import Batch, Group, Row, StepReport

VOCAB = 64


@dataclass(frozen=True)
class PlainPolicyGradient:
    """Clipped ratio times advantage, with a sequence-level term that needs whole rows."""

    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    sequence_coef: float = 0.5
    learns_by_advantage_alone: bool = False
    needs_teacher: bool = False
    teacher_top_k: int = 0
    learns_from_rollouts: bool = True
    min_group_size: int = 1

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def needs_entropy_gradient(self) -> bool:
        return self.entropy_coef > 0

    def credit(self, groups: Sequence[Group], policy: str, scores: Scores | None = None) -> Credit:
        raise NotImplementedError

    def token_weights(self, groups: Sequence[Group], policy: str) -> list[list[float]]:
        raise NotImplementedError

    def loss(self, inputs: LossInputs) -> LossOutput:
        ratio_N = (inputs.logprobs_N - inputs.old_logprobs_N).exp()
        clipped_N = ratio_N.clamp(0.8, 1.2)
        loss_N = -torch.minimum(ratio_N * inputs.advantages_N, clipped_N * inputs.advantages_N)
        if inputs.reference_logprobs_N is not None:
            gap_N = inputs.reference_logprobs_N - inputs.logprobs_N
            loss_N = loss_N + self.kl_coef * (gap_N.exp() - 1 - gap_N)
        if self.entropy_coef:
            assert inputs.entropy_N is not None
            loss_N = loss_N - self.entropy_coef * inputs.entropy_N
        zeros_R = ratio_N.new_zeros(inputs.num_rows)
        sums_R = zeros_R.index_add(0, inputs.rows_N, inputs.weights_N * inputs.logprobs_N)
        loss = (inputs.weights_N * loss_N).sum() + self.sequence_coef * sums_R.square().sum()
        ones_N = torch.ones_like(ratio_N)
        assert inputs.entropy_N is not None
        means = {
            "clip_fraction": ((ratio_N.detach() != clipped_N.detach()).sum(), ones_N.sum()),
            "ratio_error": ((ratio_N.detach() - 1).abs().sum(), ones_N.sum()),
            "entropy": (inputs.entropy_N.detach().sum(), ones_N.sum()),
        }
        return LossOutput(loss, means)


def random_rows(
    seed: int = 0, num: int = 12, *, shortest: int = 3, longest: int = 20, kind: Any = np.float64
) -> list[Row]:
    """Rows of uneven length, masks with holes, weights with one denominator for all of them."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for index in range(num):
        length = int(rng.integers(shortest, longest + 1))
        mask_T = rng.random(length) < 0.6
        mask_T[0], mask_T[length // 2 :] = False, mask_T[length // 2 :]
        mask_T[1 + int(rng.integers(0, length - 1))] = True
        columns = rng.normal(size=(4, length)) * mask_T
        rows.append(
            Row(
                tokens_T=rng.integers(3, VOCAB, size=length),
                mask_T=mask_T,
                weights_T=mask_T.astype(kind),
                advantages_T=columns[0].astype(kind),
                behaviour_logprobs_T=(-3 - np.abs(columns[1])).astype(kind) * mask_T,
                temperature=[1.0, 0.7, 1.3][index % 3],
                episode=(f"p{index // 4}", index % 4),
            )
        )
    total = sum(row.mask_T.sum() for row in rows)
    for row in rows:
        row.weights_T /= total
    return rows


def model64(seed: int = 0) -> PreTrainedModel:
    return tiny_model(seed=seed, vocab=VOCAB, dtype=torch.float64)


def make_trainer(
    model: PreTrainedModel | None = None,
    algorithm: Any = None,
    *,
    reference: PreTrainedModel | None = None,
    horizon: int = 10,
    **settings: Any,
) -> SingleTrainer:
    config = SingleTrainerConfig(**{"lr": 1e-3, "device": "cpu", **settings})
    return SingleTrainer(
        config,
        model64() if model is None else model,
        None,
        algorithm or PlainPolicyGradient(),
        horizon=horizon,
        reference=reference,
    )


def train(trainer: SingleTrainer, batches: Sequence[Sequence[Row]]) -> list[StepReport]:
    """One optimizer step a batch."""

    async def run() -> list[StepReport]:
        reports = []
        for rows in batches:
            await trainer.forward_backward(Batch("policy", list(rows)))
            reports.append(await trainer.optim_step())
        return reports

    return asyncio.run(run())


def numbers(metrics: Metrics) -> dict[str, float]:
    """Without what says how fast and in how much memory they were computed."""
    return {n: v for n, v in metrics.values().items() if not n.startswith(("time/", "perf/"))}


def gradients(
    trainer: SingleTrainer, rows: Sequence[Row]
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and a copy of the gradients of one batch; the trainer keeps none."""
    metrics = numbers(asyncio.run(trainer.forward_backward(Batch("policy", list(rows)))))
    found = {
        n: p.grad.clone() for n, p in trainer._core.model.named_parameters() if p.grad is not None
    }
    trainer._core.optimizer.zero_grad()
    return metrics, found


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def moments_of(trainer: SingleTrainer) -> dict[str, torch.Tensor]:
    return {k: t.clone() for k, t in moments(trainer._core.model, trainer._core.optimizer).items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def assert_close(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    """Relative to the largest entry of all tensors."""
    assert found.keys() == expected.keys()
    scale = max(float(t.abs().max()) for t in expected.values())
    for name, tensor in expected.items():
        gap = float((found[name] - tensor).abs().max())
        assert gap <= tolerance * scale, (name, gap, scale)
