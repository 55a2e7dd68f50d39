"""The optimizer step: AdamW's numbers, the norm, the clip, and a gradient that is not finite."""

from __future__ import annotations

import asyncio
import logging
import math

import pytest
import torch
from tiny import tiny_model
from trainer_rows import (
    PlainPolicyGradient,
    assert_equal,
    gradients,
    make_trainer,
    model64,
    moments_of,
    random_rows,
    train,
    weights,
)

from paceline.errors import ResumeMismatchError
from paceline.trainers.base import SingleTrainerConfig
from paceline.trainers.optimizer import (
    clip_gradients,
    gradient_norm,
    make_optimizer,
    set_moments,
)
from paceline.types import Batch


def test_norm_over_all_tensors_in_float32_of_half_precision_gradients():
    assert gradient_norm([torch.tensor([3.0]), torch.tensor([[4.0]])]) == 5.0
    # 1 + 2**-9 of each of 4096: in bfloat16 the norm would be rounded to 3 digits.
    many = [torch.full((64,), 1.0078125, dtype=torch.bfloat16)] * 64
    assert gradient_norm(many) == pytest.approx(64 * 1.0078125, rel=1e-6)


def test_clip_scales_down_and_never_up():
    gradient = torch.tensor([3.0, 4.0])
    clip_gradients([gradient], 5.0, 10.0)
    assert gradient.tolist() == [3.0, 4.0]
    clip_gradients([gradient], 5.0, math.inf)
    assert gradient.tolist() == [3.0, 4.0]
    clip_gradients([gradient], 5.0, 1.0)
    assert gradient.tolist() == pytest.approx([0.6, 0.8], rel=1e-6)


def test_step_equals_adamw_written_out():
    """Two steps of Loshchilov & Hutter's AdamW, with decay on matrices alone."""
    lr, (b1, b2), eps, decay = 1e-2, (0.8, 0.9), 1e-6, 0.1
    model = model64()
    trainer = make_trainer(
        model, lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay, max_grad_norm=math.inf
    )
    mirror = weights(model)
    first = {n: torch.zeros_like(p) for n, p in mirror.items()}
    second = {n: torch.zeros_like(p) for n, p in mirror.items()}
    for step in (1, 2):
        rows = random_rows(seed=step)
        _, found = gradients(trainer, rows)
        train(trainer, [rows])
        for name, p in mirror.items():
            g = found[name]
            p *= 1 - lr * decay if p.ndim >= 2 else 1
            first[name] = b1 * first[name] + (1 - b1) * g
            second[name] = b2 * second[name] + (1 - b2) * g * g
            unbiased = second[name] / (1 - b2**step)
            p -= lr * first[name] / (1 - b1**step) / (unbiased.sqrt() + eps)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), mirror[name], rtol=1e-10, atol=1e-12)


def test_norms_and_biases_are_not_decayed():
    model = tiny_model()
    optimizer = make_optimizer(model, SingleTrainerConfig(weight_decay=0.5))
    decay_of = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    for name, parameter in model.named_parameters():
        assert decay_of[id(parameter)] == (0.0 if "norm" in name else 0.5), name


def test_report_holds_the_norm_before_clipping_and_the_scheduled_rate():
    rows = random_rows()
    _, found = gradients(make_trainer(), rows)
    norm = math.sqrt(sum(float(g.square().sum()) for g in found.values()))
    trainer = make_trainer(
        max_grad_norm=norm / 10, lr=1e-3, lr_schedule="linear", lr_warmup_steps=2, horizon=4
    )
    reports = train(trainer, [rows] * 5)
    assert reports[0].grad_norm == pytest.approx(norm, rel=1e-12)
    assert [r.lr for r in reports] == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4, 0.0])
    assert [r.version for r in reports] == [1, 2, 3, 4, 5]
    assert not any(r.is_skipped for r in reports)


def test_clipped_step_equals_a_step_on_the_scaled_gradient():
    rows, scaled = random_rows(), random_rows()
    _, found = gradients(make_trainer(), rows)
    norm = math.sqrt(sum(float(g.square().sum()) for g in found.values()))
    for row in scaled:
        row.weights_T = row.weights_T * 0.5
    plain, clipped = model64(), model64()
    algorithm = PlainPolicyGradient(sequence_coef=0.0)
    _, found = gradients(make_trainer(algorithm=algorithm), rows)
    norm = math.sqrt(sum(float(g.square().sum()) for g in found.values()))
    train(make_trainer(plain, algorithm, max_grad_norm=math.inf, eps=1e-3), [scaled])
    train(make_trainer(clipped, algorithm, max_grad_norm=norm / 2, eps=1e-3), [rows])
    for name, expected in weights(plain).items():
        torch.testing.assert_close(weights(clipped)[name], expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_gradient_leaves_weights_moments_and_schedule_untouched(value, caplog):
    model = model64()
    trainer = make_trainer(model, lr_schedule="linear", horizon=5)
    good, bad = random_rows(seed=1), random_rows(seed=2)
    bad[4].advantages_T[bad[4].mask_T] = value
    train(trainer, [good])
    before, moments_before = weights(model), moments_of(trainer)
    with caplog.at_level(logging.WARNING):
        (report,) = train(trainer, [bad])
    assert report.is_skipped
    assert report.version == trainer.version == 2
    assert not math.isfinite(report.grad_norm)
    assert "not finite" in caplog.text
    assert_equal(weights(model), before)
    assert_equal(moments_of(trainer), moments_before)
    assert all(p.grad is None for p in model.parameters())

    # The run goes on as if the bad batch had not been: same weights, moments and rate.
    straight = model64()
    other = make_trainer(straight, lr_schedule="linear", horizon=5)
    expected = train(other, [good, random_rows(seed=3)])[-1]
    (after,) = train(trainer, [random_rows(seed=3)])
    assert (after.version, after.lr, after.grad_norm) == (3, expected.lr, expected.grad_norm)
    assert_equal(weights(model), weights(straight))


def test_gradients_of_several_batches_add_up_to_one_step():
    """Case 5: accumulation sums, and never divides by the number of parts."""
    rows = random_rows()
    whole, parts = model64(), model64()
    algorithm = PlainPolicyGradient()
    train(make_trainer(whole, algorithm), [rows])
    trainer = make_trainer(parts, algorithm)

    async def run() -> None:
        for part in (rows[:3], rows[3:4], rows[4:]):
            await trainer.forward_backward(Batch("policy", part))
        await trainer.optim_step()

    asyncio.run(run())
    for name, expected in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], expected, rtol=0, atol=1e-9)


def test_frozen_parameters_are_not_trained():
    model = model64()
    model.model.embed_tokens.requires_grad_(False)
    before = weights(model)
    trainer = make_trainer(model, weight_decay=0.1)
    train(trainer, [random_rows()])
    after = weights(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == before.keys() - {"model.embed_tokens.weight"}


def test_moments_of_another_model_are_refused_before_anything_changes():
    trainer = make_trainer()
    train(trainer, [random_rows()])
    model, optimizer = trainer._core.model, trainer._core.optimizer
    saved = moments_of(trainer)
    key = "exp_avg/model.norm.weight"
    for change, match in (
        ({key: torch.zeros(3)}, "shape"),
        ({"exp_avg/other": torch.zeros(3)}, "does not train"),
    ):
        with pytest.raises(ResumeMismatchError, match=match):
            set_moments(model, optimizer, {**saved, **change})
    with pytest.raises(ResumeMismatchError, match="lacks"):
        set_moments(model, optimizer, {k: t for k, t in saved.items() if k != key})
    assert_equal(moments_of(trainer), saved)
