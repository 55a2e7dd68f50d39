"""One optimizer step over several ranks has the numbers of a trainer of one process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, small_model
from fsdp_models import GivenModel, critic_of
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_model
from trainer_rows import (
    VOCAB,
    PlainPolicyGradient,
    assert_close,
    gradients,
    make_trainer,
    model64,
    moments_of,
    numbers,
    random_rows,
    train,
    weights,
)

from paceline.algorithms import ALGORITHMS
from paceline.algorithms.grpo import Grpo
from paceline.cluster.local import LocalGroup
from paceline.cluster.members import Limits
from paceline.cluster.trainer import GroupTrainer, deal, trainer_spec
from paceline.errors import TrainerError, WorkerError
from paceline.trainers.base import FSDPTrainerConfig
from paceline.types import Batch, Row

FULL = PlainPolicyGradient(kl_coef=0.3, entropy_coef=0.2)
SETTINGS = [
    {},
    {"max_tokens_per_micro_batch": 1},
    {"max_tokens_per_micro_batch": 40},
    {"max_tokens_per_micro_batch": 25, "layout": "packed"},
    {"layout": "packed", "logprob_chunk_tokens": 13},
    {"logprob_chunk_tokens": 1, "share_prefix": False},
    {"activation_checkpointing": True, "max_tokens_per_micro_batch": 40},
    {"keep_gathered": True, "max_tokens_per_micro_batch": 40},
]

IN_FLOAT32 = {"mixtral": 1e-5, "gemma2, capped logits": 1e-6, "cohere, scaled logits": 1e-6}
"""These compute some of their parts in float32, whatever the type of their weights."""


def _source(seed: int = 0, dtype: torch.dtype = torch.float64) -> GivenModel:
    return GivenModel(tiny_model, {"seed": seed, "vocab": VOCAB, "dtype": dtype})


def _scored_rows(seed: int = 0, num: int = 12) -> list[Row]:
    rows = random_rows(seed, num)
    rng = np.random.default_rng(seed + 100)
    for row in rows:
        length = len(row.tokens_T)
        row.old_logprobs_T = (-4 + 0.3 * rng.normal(size=length)) * row.mask_T
        row.reference_logprobs_T = (-4 + 0.3 * rng.normal(size=length)) * row.mask_T
    return rows


def _grouped_rows(seed: int = 0) -> list[Row]:
    """Four samples of each prompt."""
    rows = _scored_rows(seed, 16)
    prompts = np.random.default_rng(seed).integers(3, VOCAB, (4, 8))
    for i, row in enumerate(rows):
        longer = [np.zeros(8, c.dtype) for c in (row.mask_T, row.weights_T)]
        row.tokens_T = np.concatenate([prompts[i // 4], row.tokens_T])
        row.mask_T = np.concatenate([longer[0], row.mask_T])
        for name in (
            "weights_T",
            "advantages_T",
            "behaviour_logprobs_T",
            "old_logprobs_T",
            "reference_logprobs_T",
        ):
            setattr(row, name, np.concatenate([longer[1], getattr(row, name)]))
    return rows


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_loss_gradients_and_metrics_are_those_of_one_process(ranks, settings):
    rows = _scored_rows()
    metrics, expected = gradients(make_trainer(algorithm=FULL, reference=model64(7)), rows)
    trainer = ranks.make(_source(), FULL, reference=_source(7), **settings)
    found_metrics, found = ranks.gradients(trainer, rows)
    assert found_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)
    assert_close(found, expected, 1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_updated_weights_and_moments_are_those_of_one_process(ranks, dtype, tolerance):
    batches = [_scored_rows(seed) for seed in range(3)]
    model = tiny_model(vocab=VOCAB, dtype=dtype)
    settings = {"lr_schedule": "linear", "weight_decay": 0.1, "max_grad_norm": 0.05}
    single = make_trainer(model, FULL, reference=model64(7), **settings)
    reports = train(single, batches)
    trainer = ranks.make(_source(dtype=dtype), FULL, reference=_source(7), **settings)
    for batch, expected in zip(batches, reports, strict=True):
        ranks.run(trainer.forward_backward(Batch("policy", batch)))
        report = ranks.run(trainer.optim_step())
        assert report.grad_norm == pytest.approx(expected.grad_norm, rel=tolerance)
        assert report.grad_norm > 0.05
        assert (report.version, report.lr) == (expected.version, expected.lr)
    assert trainer.version == 3
    # AdamW divides by the root of squared gradients: where those are tiny, rounding is not.
    assert_close(ranks.ask("weights"), weights(model), tolerance)
    assert_close(ranks.ask("moments"), moments_of(single), tolerance)


@pytest.mark.parametrize("share", [True, False])
def test_shared_prefixes_change_no_number(ranks, share):
    rows = _grouped_rows()
    algorithm = PlainPolicyGradient(kl_coef=0.3)
    single = make_trainer(algorithm=algorithm, reference=model64(7), share_prefix=False)
    metrics, expected = gradients(single, rows)
    trainer = ranks.make(
        _source(),
        algorithm,
        reference=_source(7),
        share_prefix=share,
        max_tokens_per_micro_batch=120,
    )
    assert ranks.ask("shares") == share
    found_metrics, found = ranks.gradients(trainer, rows)
    # Norms and rotary embeddings round to float32 at other places in a tree.
    assert found_metrics == pytest.approx(metrics, rel=1e-6 if share else 1e-9, abs=1e-12)
    assert_close(found, expected, 1e-6 if share else 1e-9)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_any_architecture_has_the_gradients_of_one_process(ranks, name):
    rows = random_rows()
    metrics, expected = gradients(make_trainer(small_model(name), Grpo()), rows)
    trainer = ranks.make(
        GivenModel(small_model, {"name": name}), Grpo(), max_tokens_per_micro_batch=60
    )
    found_metrics, found = ranks.gradients(trainer, rows)
    tolerance = IN_FLOAT32.get(name, 1e-9)
    assert found_metrics == pytest.approx(metrics, rel=tolerance, abs=tolerance)
    assert_close(found, expected, tolerance)


def test_log_probs_come_back_in_the_order_of_the_rows(ranks):
    rows = _scored_rows()
    single = make_trainer(algorithm=FULL, reference=model64(7))
    trainer = ranks.make(_source(), FULL, reference=_source(7), max_tokens_per_micro_batch=40)
    for head in ("policy", "reference"):
        expected = asyncio.run(single.forward(rows, head))
        found = ranks.run(trainer.forward(rows, head))
        assert [len(scored) for scored in found] == [len(row.tokens_T) for row in rows]
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    with pytest.raises(TrainerError, match="no 'values'"):
        ranks.run(trainer.forward(rows, "values"))


@pytest.mark.parametrize("num", [0, 1, 2, 3])
def test_a_rank_without_rows_takes_part_and_adds_nothing(ranks, num):
    rows = _scored_rows(num=12)[:num]
    metrics, expected = gradients(make_trainer(algorithm=FULL, reference=model64(7)), rows)
    trainer = ranks.make(_source(), FULL, reference=_source(7), max_tokens_per_micro_batch=1)
    found_metrics, found = ranks.gradients(trainer, rows)
    assert found_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)
    assert_close(found, expected, 1e-9) if num else None
    assert len(ranks.run(trainer.forward(rows, "policy"))) == num


def test_a_batch_without_trained_tokens_is_counted_once(ranks):
    rows = _scored_rows()
    for row in rows:
        row.mask_T = np.zeros_like(row.mask_T)
    model = model64()
    single = make_trainer(model, FULL, reference=model64(7), weight_decay=0.1)
    expected = numbers(asyncio.run(single.forward_backward(Batch("policy", rows))))
    asyncio.run(single.optim_step())
    trainer = ranks.make(_source(), FULL, reference=_source(7), weight_decay=0.1)
    assert numbers(ranks.run(trainer.forward_backward(Batch("policy", rows)))) == expected
    assert expected["train/empty_batches"] == 1
    report = ranks.run(trainer.optim_step())
    assert (report.grad_norm, report.is_skipped) == (0.0, False)
    assert_close(ranks.ask("weights"), weights(model), 1e-12)


@pytest.mark.parametrize("idle", [set(), {0, 3, 7}, set(range(1, 12)), set(range(12))], ids=str)
@pytest.mark.parametrize("budget", [8192, 30])
def test_rows_without_a_gradient_change_no_number(ranks, idle, budget):
    rows = _scored_rows()
    for index in idle:
        rows[index].advantages_T = np.zeros_like(rows[index].advantages_T)
    metrics, expected = gradients(make_trainer(algorithm=Grpo()), rows)
    trainer = ranks.make(_source(), Grpo(), max_tokens_per_micro_batch=budget)
    found_metrics, found = ranks.gradients(trainer, rows)
    assert found_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)
    assert_close(found, expected, 1e-9)


@pytest.mark.parametrize("where", ["advantages_T", "old_logprobs_T", "idle"])
def test_a_number_that_is_none_on_one_rank_skips_the_step_on_all(ranks, where):
    trainer = ranks.make(_source(), Grpo(), max_tokens_per_micro_batch=30)
    before = ranks.ask("weights")
    rows = _scored_rows()
    if where == "idle":
        rows[-1].advantages_T = np.zeros_like(rows[-1].advantages_T)
    column = "old_logprobs_T" if where == "idle" else where
    getattr(rows[-1], column)[rows[-1].mask_T] = np.nan
    ranks.run(trainer.forward_backward(Batch("policy", rows)))
    report = ranks.run(trainer.optim_step())
    assert report.is_skipped
    assert report.version == 1
    assert_close(ranks.ask("weights"), before, 0.0)
    ranks.run(trainer.forward_backward(Batch("policy", _scored_rows())))
    report = ranks.run(trainer.optim_step())
    assert (report.is_skipped, report.version) == (False, 2)


def test_a_loss_that_only_one_rank_knows_to_be_lost_skips_the_step_on_all(ranks):
    trainer = ranks.make(_source(), Grpo())
    before = ranks.ask("weights")
    ranks.run(trainer.forward_backward(Batch("policy", _scored_rows())))
    ranks.ask("poison", ranks.size - 1)
    assert ranks.run(trainer.optim_step()).is_skipped
    assert_close(ranks.ask("weights"), before, 0.0)


def test_scores_between_two_steps_are_those_of_the_newest_weights(ranks):
    """What was gathered for a pass without gradient is not used again."""
    rows = _scored_rows()
    model = model64()
    single = make_trainer(model, Grpo(), lr=1e-2)
    trainer = ranks.make(_source(), Grpo(), lr=1e-2)
    for _ in range(2):
        train(single, [rows])
        ranks.run(trainer.forward_backward(Batch("policy", rows)))
        ranks.run(trainer.forward(rows, "policy"))
        ranks.run(trainer.optim_step())
        expected = asyncio.run(single.forward(rows, "policy"))
        for found, other in zip(ranks.run(trainer.forward(rows, "policy")), expected, strict=True):
            np.testing.assert_allclose(found, other, rtol=1e-7, atol=1e-12)


def test_a_critic_learns_what_it_learns_in_one_process(ranks):
    objective = ALGORITHMS["ppo"]().critic
    rows = _scored_rows()
    rng = np.random.default_rng(5)
    for row in rows:
        row.values_T = rng.normal(size=len(row.tokens_T)) * row.mask_T
        row.returns_T = rng.normal(size=len(row.tokens_T)) * row.mask_T
    named = {"vocab": VOCAB, "dtype": torch.float64}
    single = make_trainer(critic_of(**named), objective)
    trainer = ranks.make(
        GivenModel(critic_of, named), objective, head="values", max_tokens_per_micro_batch=40
    )
    expected_values = asyncio.run(single.forward(rows, "values"))
    for one, other in zip(ranks.run(trainer.forward(rows, "values")), expected_values, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    metrics, expected = gradients(single, rows)
    found_metrics, found = ranks.gradients(trainer, rows)
    assert found_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)
    assert_close(found, expected, 1e-9)


def test_autocast_gathers_in_bfloat16_and_keeps_float32(ranks):
    rows = _scored_rows()
    _, expected = gradients(make_trainer(tiny_model(vocab=VOCAB), Grpo()), rows)
    trainer = ranks.make(_source(dtype=torch.float32), Grpo(), autocast="bfloat16")
    scores = ranks.run(trainer.forward(rows, "policy"))
    assert all(scored.dtype == np.float32 for scored in scores)
    _, found = ranks.gradients(trainer, rows)
    assert all(t.dtype == torch.float32 for t in [*found.values(), *ranks.ask("weights").values()])
    assert_close(found, expected, 0.1)
    with pytest.raises(AssertionError):
        assert_close(found, expected, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"max_tokens_per_micro_batch": 30}], ids=str)
def test_copies_of_the_shards_add_up_too(ranks, settings):
    if ranks.size == 1:
        pytest.skip("one rank has no copies")
    rows = _scored_rows()
    metrics, expected = gradients(make_trainer(algorithm=FULL, reference=model64(7)), rows)
    trainer = ranks.make(_source(), FULL, reference=_source(7), replicas=2, **settings)
    found_metrics, found = ranks.gradients(trainer, rows)
    assert found_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)
    assert_close(found, expected, 1e-9)
    single = make_trainer(algorithm=FULL, reference=model64(7))
    (expected_report,) = train(single, [rows])
    ranks.run(trainer.forward_backward(Batch("policy", rows)))
    report = ranks.run(trainer.optim_step())
    assert report.grad_norm == pytest.approx(expected_report.grad_norm, rel=1e-9)


def test_each_rank_holds_its_share(ranks):
    ranks.make(_source(), Grpo())
    shapes = ranks.run(ranks.group.call("local_shapes"))
    total = sum(p.numel() for p in model64().parameters())
    held = [sum(int(np.prod(shape)) for shape in own.values()) for own in shapes]
    assert sum(held) == total
    assert max(held) <= 1.1 * total / ranks.size


@dataclass(frozen=True)
class Stumbling(PlainPolicyGradient):
    """Raises at one row."""

    def loss(self, inputs):
        if (inputs.advantages_N == 123.0).any():
            raise LookupError("no loss for this row")
        return super().loss(inputs)


def test_after_an_error_in_the_loss_a_lone_rank_goes_on(ranks):
    if ranks.size > 1:
        pytest.skip("several ranks can not: see below")
    trainer = ranks.make(_source(), Stumbling(), max_tokens_per_micro_batch=30)
    rows = _scored_rows()
    rows[-1].advantages_T = np.full_like(rows[-1].advantages_T, 123.0)
    with pytest.raises(LookupError):
        ranks.run(trainer.forward_backward(Batch("policy", rows)))
    metrics, expected = gradients(make_trainer(algorithm=Stumbling()), rows[:-1])
    found_metrics, found = ranks.gradients(trainer, rows[:-1])
    assert found_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)
    assert_close(found, expected, 1e-9)


@pytest.mark.slow
def test_an_error_of_one_of_several_ranks_ends_all_in_time(tmp_path):
    rows = _scored_rows()
    model = model64()
    expected = train(make_trainer(model, Stumbling()), [rows])

    async def run() -> None:
        config = FSDPTrainerConfig(lr=1e-3, ranks=2, max_tokens_per_micro_batch=30, threads=1)
        spec = trainer_spec("trainer", config, _source(), Stumbling(), horizon=10)
        group = await LocalGroup.start(spec, tmp_path, limits=Limits(start_s=60, settle_s=1))
        trainer = GroupTrainer(group, Stumbling())
        try:
            await trainer.forward_backward(Batch("policy", rows))
            report = await trainer.optim_step()
            assert report.grad_norm == pytest.approx(expected[0].grad_norm, rel=1e-9)
            rows[-1].advantages_T = np.full_like(rows[-1].advantages_T, 123.0)
            with pytest.raises(WorkerError, match="no loss for this row"):
                await trainer.forward_backward(Batch("policy", rows))
            with pytest.raises(WorkerError, match="has ended"):
                await trainer.optim_step()
        finally:
            await trainer.aclose()

    asyncio.run(asyncio.wait_for(run(), 100))


def test_rows_that_do_not_fit_are_refused_before_any_rank_works(ranks):
    trainer = ranks.make(_source(), FULL, reference=_source(7))
    rows = _scored_rows()
    rows[3].reference_logprobs_T = None
    with pytest.raises(TrainerError, match="all or none"):
        ranks.run(trainer.forward_backward(Batch("policy", rows)))
    rows = _scored_rows()
    rows[3].mask_T[0] = True
    with pytest.raises(TrainerError, match="first token"):
        ranks.run(trainer.forward(rows, "policy"))
    metrics, _ = ranks.gradients(trainer, _scored_rows())
    assert metrics["train/trained_tokens"] > 0


@given(lengths=st.lists(st.integers(1, 30), max_size=40), size=st.integers(1, 5))
def test_rows_are_dealt_in_order_and_evenly(lengths, size):
    rows = []
    for length in lengths:
        column_T = np.zeros(length + 1)
        mask_T = np.arange(length + 1) == length
        rows.append(Row(np.zeros(length + 1, int), mask_T, column_T, column_T, column_T))
    parts = deal(rows, size)
    assert [id(row) for part in parts for row in part] == [id(row) for row in rows]
    assert len(parts) == size
    loads = [sum(len(row.tokens_T) - 1 for row in part) for part in parts]
    assert max(loads) <= sum(lengths) / size + max(lengths, default=0)


def test_copies_must_share_the_ranks_evenly():
    with pytest.raises(ValueError, match="multiple of `replicas`"):
        FSDPTrainerConfig(ranks=3, replicas=2)
