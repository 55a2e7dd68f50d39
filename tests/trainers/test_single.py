"""One optimizer step: its numbers do not depend on how the rows are cut, laid out or ordered."""

from __future__ import annotations

import asyncio
import copy
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import tiny_model
from trainer_rows import (
    PlainPolicyGradient,
    assert_close,
    assert_equal,
    gradients,
    make_trainer,
    model64,
    random_rows,
    train,
    weights,
)

from paceline.algorithms import ALGORITHMS
from paceline.errors import ConfigError, TrainerError
from paceline.trainers.base import SingleTrainerConfig
from paceline.types import Batch
from paceline.weights.base import WeightPlan

FULL = PlainPolicyGradient(kl_coef=0.3, entropy_coef=0.2)


def _scored_rows(seed: int = 0, num: int = 12):
    """Rows with old and reference log-probs."""
    rows = random_rows(seed, num)
    rng = np.random.default_rng(seed + 100)
    for row in rows:
        length = len(row.tokens_T)
        row.old_logprobs_T = (-4 + 0.3 * rng.normal(size=length)) * row.mask_T
        row.reference_logprobs_T = (-4 + 0.3 * rng.normal(size=length)) * row.mask_T
    return rows


def _full_trainer(**settings):
    return make_trainer(algorithm=FULL, reference=model64(seed=7), **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens_per_micro_batch": 1},
        {"max_tokens_per_micro_batch": 40},
        {"max_tokens_per_micro_batch": 25, "layout": "packed"},
        {"layout": "packed"},
        {"logprob_chunk_tokens": 1},
        {"logprob_chunk_tokens": 13, "layout": "packed"},
        {"activation_checkpointing": True, "max_tokens_per_micro_batch": 40},
    ],
    ids=str,
)
def test_loss_gradients_and_metrics_do_not_depend_on_how_rows_are_cut(settings):
    rows = _scored_rows()
    metrics, expected = gradients(_full_trainer(), rows)
    found_metrics, found = gradients(_full_trainer(**settings), rows)
    assert found_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)
    assert_close(found, expected, 1e-9)


@pytest.mark.parametrize("budget", [8192, 40])
def test_loss_and_gradients_do_not_depend_on_the_order_of_rows(budget):
    rows = _scored_rows()
    order = np.random.default_rng(1).permutation(len(rows))
    metrics, expected = gradients(_full_trainer(max_tokens_per_micro_batch=budget), rows)
    shuffled = [rows[i] for i in order]
    found_metrics, found = gradients(_full_trainer(max_tokens_per_micro_batch=budget), shuffled)
    assert found_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)
    assert_close(found, expected, 1e-9)


def test_rows_without_trained_tokens_change_nothing():
    rows = _scored_rows()
    extra = _scored_rows(seed=9, num=4)
    for row in extra:
        row.mask_T = np.zeros_like(row.mask_T)
    metrics, expected = gradients(_full_trainer(), rows)
    found_metrics, found = gradients(_full_trainer(), [*extra[:2], *rows, *extra[2:]])
    assert found_metrics == metrics
    assert_equal(found, expected)


def test_gradients_equal_those_of_whole_logits_row_by_row():
    rows, model = _scored_rows(num=5), model64()
    losses = []
    for row in rows:
        ids = torch.tensor(row.tokens_T)[None]
        logits_TV = model(input_ids=ids, use_cache=False).logits[0, :-1] / row.temperature
        all_TV = torch.log_softmax(logits_TV, -1)
        at = np.flatnonzero(row.mask_T)
        lp = all_TV[at - 1, row.tokens_T[at]]
        entropy = -(all_TV.exp() * all_TV).sum(-1)[at - 1]
        pick = [row.old_logprobs_T, row.reference_logprobs_T, row.advantages_T, row.weights_T]
        old, reference, advantage, weight = (torch.tensor(c[at]) for c in pick)
        ratio = (lp - old).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        kl = (reference - lp).exp() - 1 - (reference - lp)
        losses.append((weight * (-surrogate + 0.3 * kl - 0.2 * entropy)).sum())
        losses.append(0.5 * (weight * lp).sum().square())
    loss = torch.stack(losses).sum()
    loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    metrics, found = gradients(_full_trainer(), rows)
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert_close(found, expected, 1e-10)


@pytest.mark.parametrize("settings", [{}, {"max_tokens_per_micro_batch": 40}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_first_update_has_a_ratio_of_exactly_one(settings, dtype):
    """Case 20, with old log-probs taken from a forward pass, and with none."""
    rows = random_rows()
    trainer = make_trainer(tiny_model(dtype=dtype), **settings)
    for scored in (True, False):
        old = asyncio.run(trainer.forward(rows, "policy"))
        for row, old_T in zip(rows, old, strict=True):
            row.old_logprobs_T = old_T if scored else None
        metrics, _ = gradients(trainer, rows)
        assert metrics["train/ratio_error"] == 0.0
        assert metrics["train/clip_fraction"] == 0.0


def test_forward_gives_log_probs_of_trained_tokens_and_zeros_elsewhere():
    rows, model = random_rows(), model64()
    reference = model64(seed=3)
    trainer = make_trainer(model, reference=reference, max_tokens_per_micro_batch=50)
    for head, scorer in (("policy", model), ("reference", reference)):
        found = asyncio.run(trainer.forward(rows, head))
        for row, found_T in zip(rows, found, strict=True):
            ids = torch.tensor(row.tokens_T)[None]
            with torch.no_grad():
                logits_TV = scorer(input_ids=ids).logits[0, :-1] / row.temperature
            all_T = torch.log_softmax(logits_TV, -1).gather(1, ids[0, 1:, None])[:, 0].numpy()
            expected_T = np.concatenate([[0.0], all_T]) * row.mask_T
            assert found_T.shape == row.tokens_T.shape
            np.testing.assert_allclose(found_T, expected_T, rtol=0, atol=1e-10)


def test_forward_of_a_head_that_is_not_there():
    trainer = make_trainer()
    with pytest.raises(TrainerError, match="no 'reference'"):
        asyncio.run(trainer.forward(random_rows(), "reference"))
    with pytest.raises(TrainerError, match="no 'values'"):
        asyncio.run(trainer.forward(random_rows(), "values"))


def test_mismatch_is_the_distance_of_behaviour_from_old_log_probs():
    rows = random_rows()
    trainer = make_trainer()
    exact = asyncio.run(trainer.forward(rows, "policy"))
    for row, exact_T in zip(rows, exact, strict=True):
        row.behaviour_logprobs_T = exact_T - 0.25 * row.mask_T
    metrics, _ = gradients(trainer, rows)
    assert metrics["train/mismatch_max"] == pytest.approx(0.25, abs=1e-12)
    assert metrics["train/trained_tokens"] == sum(int(r.mask_T.sum()) for r in rows)


def test_an_all_masked_batch_has_no_loss_no_gradient_and_is_counted():
    """Case 12."""
    rows = random_rows(num=4)
    for row in rows:
        row.mask_T[:] = False
    model = model64()
    before = weights(model)
    trainer = make_trainer(model)
    metrics = asyncio.run(trainer.forward_backward(Batch("policy", rows))).values()
    assert metrics["train/loss"] == 0.0
    assert metrics["train/empty_batches"] == 1
    assert all(np.isfinite(value) for value in metrics.values())
    report = asyncio.run(trainer.optim_step())
    assert (report.version, report.grad_norm, report.is_skipped) == (1, 0.0, False)
    assert_equal(weights(model), before)


def test_entropy_carries_gradient_only_where_the_algorithm_needs_it():
    seen: list[bool] = []

    class Watching(PlainPolicyGradient):
        def loss(self, inputs):
            seen.append(inputs.entropy_N.requires_grad)
            return super().loss(inputs)

    for entropy_coef in (0.0, 0.1):
        gradients(make_trainer(algorithm=Watching(entropy_coef=entropy_coef)), random_rows())
    assert seen == [False, True]


def test_optional_columns_are_in_all_rows_or_in_none():
    rows = _scored_rows()
    rows[3].old_logprobs_T = None
    with pytest.raises(TrainerError, match=r"11 of 12 rows.*old_logprobs_T"):
        gradients(_full_trainer(), rows)
    with pytest.raises(TrainerError, match="reference log-probs"):
        gradients(_full_trainer(), random_rows())


def test_a_failed_batch_leaves_no_gradient_behind():
    calls: list[int] = []

    class Failing(PlainPolicyGradient):
        def loss(self, inputs):
            calls.append(inputs.num_rows)
            if len(calls) == 3:
                raise ValueError("third micro-batch")
            return super().loss(inputs)

    trainer = make_trainer(algorithm=Failing(), max_tokens_per_micro_batch=1)
    with pytest.raises(ValueError, match="third"):
        gradients(trainer, random_rows(num=5))
    assert all(p.grad is None for p in trainer._core.model.parameters())


def test_cancelled_between_micro_batches_the_thread_is_idle_and_no_gradient_is_left():
    async def run() -> None:
        loop = asyncio.get_running_loop()
        begun = asyncio.Event()
        count = 0

        class Counting(PlainPolicyGradient):
            def loss(self, inputs):
                nonlocal count
                count += 1
                loop.call_soon_threadsafe(begun.set)
                return super().loss(inputs)

        trainer = make_trainer(algorithm=Counting(), max_tokens_per_micro_batch=1)
        rows = random_rows(num=400)
        task = asyncio.create_task(trainer.forward_backward(Batch("policy", rows)))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        at_cancel = count
        assert at_cancel < len(rows)
        assert all(p.grad is None for p in trainer._core.model.parameters())
        await trainer.forward_backward(Batch("policy", rows[:3]))
        assert count == at_cancel + 3
        await trainer.aclose()

    asyncio.run(run())


def test_steps_with_a_reference_ratio_far_away_stay_finite():
    """Case 14: the log-ratio to the reference is 100; the loss of this file's algorithm overflows,
    so the update is skipped, and a bounded one is not."""
    rows = random_rows()
    for row in rows:
        row.reference_logprobs_T = 1e4 * row.mask_T
    model = tiny_model(dtype=torch.float32)
    before = weights(model)
    trainer = make_trainer(model, PlainPolicyGradient(kl_coef=1.0), reference=tiny_model(seed=2))
    (report,) = train(trainer, [rows])
    assert report.is_skipped
    assert_equal(weights(model), before)


def test_a_loss_that_is_no_number_skips_the_update_even_where_its_gradient_is_zero():
    """Clipping what is no number has the gradient zero: only the loss itself tells of it."""
    rows = random_rows()
    rows[0].old_logprobs_T = np.where(rows[0].mask_T, np.nan, 0.0)
    model = tiny_model(dtype=torch.float32)
    before = weights(model)
    trainer = make_trainer(model, ALGORITHMS["grpo"]())
    for row in rows[1:]:
        row.old_logprobs_T = row.behaviour_logprobs_T
    reports = train(trainer, [rows, [replace(row, old_logprobs_T=None) for row in rows]])
    assert [report.is_skipped for report in reports] == [True, False]
    assert any(not torch.equal(weights(model)[name], before[name]) for name in before)


def test_shared_storage_sees_each_step_and_send_copies_nothing():
    model = model64()
    trainer = make_trainer(model)
    plan = asyncio.run(trainer.send(WeightPlan("policy", 0, "shared")))
    assert plan.tensors is not None
    before = plan.tensors["model.norm.weight"].clone()
    train(trainer, [random_rows()])
    assert plan.tensors["model.norm.weight"].data_ptr() == model.model.norm.weight.data_ptr()
    assert not torch.equal(plan.tensors["model.norm.weight"], before)


def test_place_on_a_cpu_moves_nothing():
    trainer = make_trainer()
    rows = random_rows()
    expected = gradients(trainer, rows)
    for where in ("host", "host", "device"):
        asyncio.run(trainer.place(where))
    asyncio.run(trainer.place("host"))
    found = gradients(trainer, rows)
    assert found[0] == expected[0]
    assert_equal(found[1], expected[1])


def test_autocast_computes_in_bfloat16_and_keeps_float32_weights():
    model = tiny_model()
    trainer = make_trainer(model, autocast="bfloat16")
    rows = random_rows()
    rough = asyncio.run(trainer.forward(rows, "policy"))
    exact = asyncio.run(make_trainer(copy.deepcopy(model)).forward(rows, "policy"))
    gap = max(float(np.abs(a - b).max()) for a, b in zip(rough, exact, strict=True))
    assert 0 < gap < 0.05
    train(trainer, [rows])
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_the_model_is_in_evaluation_mode_and_the_reference_frozen():
    model, reference = model64().train(), model64(seed=1).train()
    make_trainer(model, reference=reference)
    assert not model.training
    assert not reference.training
    assert not any(p.requires_grad for p in reference.parameters())


def test_what_can_not_be_trained_is_refused():
    with pytest.raises(ConfigError, match="float16"):
        make_trainer(tiny_model(dtype=torch.float16))
    with pytest.raises(TrainerError, match="requires a gradient"):
        make_trainer(model64().requires_grad_(False))
    model = model64()
    with pytest.raises(TrainerError, match="the trained model itself"):
        make_trainer(model, reference=model)
    with pytest.raises(TrainerError, match="needs a reference"):
        make_trainer(algorithm=FULL)


@pytest.mark.parametrize(("name", "match"), [("tpu", "allowed are"), ("cuda:99", "CUDA devices")])
def test_a_device_that_is_not_there(name, match):
    with pytest.raises(ConfigError, match=match):
        make_trainer(device=name)


def test_threads_are_set_for_the_trainers_own_thread():
    before = torch.get_num_threads()
    seen: list[int] = []

    class Watching(PlainPolicyGradient):
        def loss(self, inputs):
            seen.append(torch.get_num_threads())
            return super().loss(inputs)

    try:
        gradients(make_trainer(algorithm=Watching(), threads=before + 1), random_rows())
    finally:
        torch.set_num_threads(before)
    assert seen == [before + 1]


def test_closing_ends_the_thread_and_may_be_repeated():
    async def run() -> None:
        trainer = make_trainer()
        await trainer.forward(random_rows(), "policy")
        await trainer.aclose()
        await trainer.aclose()
        with pytest.raises(RuntimeError, match="shutdown"):
            await trainer.forward(random_rows(), "policy")

    asyncio.run(run())
    assert not [t for t in threading.enumerate() if t.name.startswith("trainer")]


def test_configuration_has_documented_fields_and_infinite_clip():
    assert all(field.description for field in SingleTrainerConfig.model_fields.values())
    config = SingleTrainerConfig(max_grad_norm=float("inf"))
    assert config.max_grad_norm == float("inf")
