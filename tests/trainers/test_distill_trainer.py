"""Distillation through the real trainer: numbers that no layout changes; a student that learns."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from trainer_rows import (
    VOCAB,
    assert_close,
    gradients,
    make_trainer,
    model64,
    random_rows,
    train,
)

from paceline.algorithms.distill import Distill, top_k_kl
from paceline.errors import TrainerError
from paceline.teachers.loaded import LoadedTeacher
from paceline.trainers.base import SingleTrainerConfig
from paceline.types import Row

ALGORITHMS = {
    "sampled token": Distill(),
    "sampled token, kl and entropy": Distill(kl_coef=0.1, entropy_coef=0.05, clip_high=0.3),
    "top 5": Distill(top_k=5),
    "top 5, teacher's weights": Distill(top_k=5, top_k_weights="teacher", entropy_coef=0.05),
}
each = pytest.mark.parametrize("name", ALGORITHMS)
LAYOUTS: list[dict[str, Any]] = [
    {"max_tokens_per_micro_batch": 1},
    {"max_tokens_per_micro_batch": 1, "logprob_chunk_tokens": 3},
    {"layout": "packed", "max_tokens_per_micro_batch": 60},
]


def graded_rows(algorithm: Distill, seed: int = 0, num: int = 12, **settings: Any) -> list[Row]:
    """Rows with a teacher's columns, and log-probs from before a first update."""
    rows = random_rows(seed, num)
    rng = np.random.default_rng(seed)
    for row in rows:
        noise_T = rng.normal(size=(2, len(row.tokens_T)))
        row.old_logprobs_T = (-4 + 0.3 * noise_T[0]) * row.mask_T
        if algorithm.needs_reference:
            row.reference_logprobs_T = (-4 + 0.3 * noise_T[1]) * row.mask_T
    grade(algorithm, rows, **settings)
    return rows


def grade(algorithm: Distill, rows: list[Row], **settings: Any) -> None:
    config = SingleTrainerConfig(**{"device": "cpu", **settings})
    teacher = LoadedTeacher(
        config, model64(seed=7), "teacher", top_k=algorithm.teacher_top_k, vocab=VOCAB
    )

    async def run() -> None:
        await teacher.grade(rows)
        await teacher.aclose()

    asyncio.run(run())


def trainer_of(algorithm: Distill, **settings: Any) -> Any:
    reference = model64(seed=5) if algorithm.needs_reference else None
    return make_trainer(algorithm=algorithm, reference=reference, **settings)


def padding_row(like: Row) -> Row:
    """A row of which nothing is trained."""
    nothing_T = np.zeros(len(like.tokens_T))
    ids_TK, top_TK = like.teacher_ids_TK, like.teacher_top_logprobs_TK
    return Row(
        tokens_T=like.tokens_T,
        mask_T=np.zeros(len(like.tokens_T), bool),
        weights_T=nothing_T,
        advantages_T=nothing_T,
        behaviour_logprobs_T=nothing_T,
        old_logprobs_T=nothing_T,
        reference_logprobs_T=None if like.reference_logprobs_T is None else nothing_T,
        teacher_logprobs_T=nothing_T,
        teacher_ids_TK=None if ids_TK is None else np.zeros_like(ids_TK),
        teacher_top_logprobs_TK=None if top_TK is None else np.zeros_like(top_TK),
    )


@each
@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_loss_gradients_and_metrics_do_not_depend_on_how_rows_are_cut(
    name: str, settings: dict[str, Any]
) -> None:
    """Case 3: the teacher grades, and the student learns, in other micro-batches and order."""
    algorithm = ALGORITHMS[name]
    rows = graded_rows(algorithm)
    metrics, expected = gradients(trainer_of(algorithm), rows)
    other = graded_rows(algorithm, **settings)[::-1]
    found_metrics, found = gradients(trainer_of(algorithm, **settings), other)
    assert found_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)
    assert_close(found, expected, 1e-9)


@each
def test_rows_without_a_trained_token_change_nothing(name: str) -> None:
    algorithm = ALGORITHMS[name]
    rows = graded_rows(algorithm)
    metrics, expected = gradients(trainer_of(algorithm), rows)
    padded = [padding_row(rows[0]), *rows, padding_row(rows[3])]
    grade(algorithm, padded)
    found_metrics, found = gradients(trainer_of(algorithm), padded)
    assert found_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)
    assert_close(found, expected, 1e-9)


@each
def test_splitting_a_batch_splits_its_gradient(name: str) -> None:
    """As data parallelism would: gradients of the parts add up to that of the whole."""
    algorithm = ALGORITHMS[name]
    rows = graded_rows(algorithm)
    _, expected = gradients(trainer_of(algorithm), rows)
    parts = [gradients(trainer_of(algorithm), part)[1] for part in (rows[::2], rows[1::2])]
    assert_close({n: parts[0][n] + parts[1][n] for n in expected}, expected, 1e-9)


@pytest.mark.parametrize("weights", ["student", "teacher"])
def test_the_top_k_gradient_is_that_of_autograd_through_the_whole_log_softmax(weights: Any) -> None:
    """The first update: every ratio is 1, advantages are 0, so the loss is the weighted KL."""
    algorithm = Distill(top_k=5, top_k_weights=weights)
    rows = graded_rows(algorithm)
    for row in rows:
        row.old_logprobs_T, row.advantages_T = None, np.zeros(len(row.tokens_T))
    metrics, found = gradients(trainer_of(algorithm, logprob_chunk_tokens=4), rows)
    model = model64()
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        logits_TV = model(torch.tensor(row.tokens_T)[None]).logits[0] / row.temperature
        trained = np.flatnonzero(row.mask_T)
        logprobs_NV = logits_TV.log_softmax(-1)[trained - 1]
        assert row.teacher_ids_TK is not None
        assert row.teacher_top_logprobs_TK is not None
        ids_NK = torch.tensor(row.teacher_ids_TK[trained]).long()
        kl_N = top_k_kl(
            logprobs_NV.gather(1, ids_NK),
            torch.tensor(row.teacher_top_logprobs_TK[trained]),
            weights,
        )
        total = total + (torch.tensor(row.weights_T[trained]) * kl_N).sum()
    total.backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert metrics["train/loss"] == pytest.approx(total.item(), rel=1e-9)
    assert_close(found, expected, 1e-9)


@pytest.mark.parametrize("name", ["top 5", "top 5, teacher's weights"])
def test_a_student_comes_nearer_to_its_teacher(name: str) -> None:
    algorithm = ALGORITHMS[name]
    rows = graded_rows(algorithm)
    trainer = trainer_of(algorithm, lr=3e-3)
    for row in rows:
        row.old_logprobs_T, row.advantages_T = None, np.zeros(len(row.tokens_T))
    before, _ = gradients(trainer, rows)
    train(trainer, [rows] * 10)
    after, _ = gradients(trainer, rows)
    assert after["train/kl_teacher"] < 0.7 * before["train/kl_teacher"]


def test_columns_that_are_missing_or_do_not_fit_are_named() -> None:
    plain = make_trainer(algorithm=Distill())
    rows = random_rows()
    with pytest.raises(TrainerError, match="needs a teacher's log-probs"):
        gradients(plain, rows)
    grade(Distill(), rows[:3])
    with pytest.raises(TrainerError, match="3 of 12 rows of the batch have teacher_logprobs_T"):
        gradients(plain, rows)
    top = make_trainer(algorithm=Distill(top_k=5))
    grade(Distill(), rows)
    with pytest.raises(TrainerError, match=r"the 5 most likely tokens of a teacher.* has none"):
        gradients(top, rows)
    grade(Distill(top_k=4), rows)
    with pytest.raises(TrainerError, match=r"shape \(\d+, 4\).*top_k = 5"):
        gradients(top, rows)


@each
def test_sharing_the_prompts_of_a_group_changes_no_number(name: str) -> None:
    """Teacher and student compute what answers begin with once, or each for itself."""
    algorithm = ALGORITHMS[name]

    def rows_of(**settings: Any) -> list[Row]:
        rows = graded_rows(algorithm)
        for row in rows:  # four answers to each of three prompts
            row.tokens_T = np.concatenate([np.arange(20) + len(row.episode[0]), row.tokens_T])
            for column in vars_of(row):
                values_T = getattr(row, column)
                padding = np.zeros((20, *values_T.shape[1:]), values_T.dtype)
                setattr(row, column, np.concatenate([padding, values_T]))
        grade(algorithm, rows, **settings)
        return rows

    whole, shared = rows_of(share_prefix=False), rows_of(share_prefix=True)
    trainer = trainer_of(algorithm, share_prefix=True)
    assert trainer._core.trained.shares_prefixes
    metrics, expected = gradients(trainer_of(algorithm, share_prefix=False), whole)
    found_metrics, found = gradients(trainer, shared)
    # The model's norms and rotary embedding compute in float32.
    assert found_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-9)
    assert_close(found, expected, 1e-6)


def vars_of(row: Row) -> list[str]:
    """Its columns other than tokens."""
    names = [field.name for field in dataclasses.fields(row) if field.name.endswith(("_T", "_TK"))]
    return [name for name in names if name != "tokens_T" and getattr(row, name) is not None]
