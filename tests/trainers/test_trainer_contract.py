"""What every trainer does, whichever it is: the same tests for each.

A new trainer is one more entry of `MAKERS`. Weights are looked at as receivers get them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsdp_hosts import hosts
from fsdp_models import GivenModel
from safetensors.torch import load_file
from tiny import tiny_model
from trainer_rows import VOCAB, PlainPolicyGradient, make_trainer, numbers, random_rows

from paceline.algorithms.grpo import Grpo
from paceline.errors import CheckpointError, ResumeMismatchError, TrainerError
from paceline.types import Batch, Row, StepReport
from paceline.weights.base import Transport, WeightPlan
from paceline.weights.receive import receive_parcels
from paceline.weights.tensors import checksums, named_tensors

FULL = PlainPolicyGradient(kl_coef=0.3, entropy_coef=0.2)
SCHEDULE = {"lr_schedule": "cosine", "lr_warmup_steps": 2, "weight_decay": 0.1}
NAMES = [name for name, _ in tiny_model(vocab=VOCAB).named_parameters()]


class Subject:
    """Makes one trainer of a tiny model after the other; the newest one is the only one."""

    def __init__(self, run: Callable[[Any], Any], make: Callable[..., Any]) -> None:
        self.run, self._make = run, make

    def make(
        self,
        seed: int = 0,
        objective: Any = None,
        *,
        dtype: torch.dtype = torch.float64,
        reference: int | None = None,
        model: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Any:
        """reference: the seed of it. model: what is not as in `tiny_model`."""
        named = {"seed": seed, "vocab": VOCAB, "dtype": dtype, **(model or {})}
        given = None if reference is None else {**named, "seed": reference}
        return self._make(named, objective or PlainPolicyGradient(), given, settings)

    def learn(self, trainer: Any, rows: list[Row]) -> tuple[dict[str, float], StepReport]:
        metrics = self.run(trainer.forward_backward(Batch("policy", rows)))
        return numbers(metrics), self.run(trainer.optim_step())

    def source(self, trainer: Any, transport: Transport = "handles", **plan: Any) -> Any:
        return self.run(trainer.send(WeightPlan("policy", trainer.version, transport, **plan)))

    def bits(self, trainer: Any) -> dict[str, str]:
        """A hash of every weight."""
        return dict(self.run(self.source(trainer).source.checksums()))

    def weights(self, trainer: Any) -> dict[str, torch.Tensor]:
        return dict(self.run(self.source(trainer).source.numbers(NAMES)))

    def save(self, trainer: Any, path: Path) -> Path:
        path.mkdir()
        self.run(trainer.save(path))
        return path


@contextmanager
def single(logs: Path) -> Iterator[Subject]:
    made: list[Any] = []

    def make(named: Any, objective: Any, reference: Any, settings: Any) -> Any:
        given = None if reference is None else tiny_model(**reference)
        made.append(make_trainer(tiny_model(**named), objective, reference=given, **settings))
        return made[-1]

    with asyncio.Runner() as runner:
        yield Subject(runner.run, make)
        for trainer in made:
            runner.run(trainer.aclose())


def fsdp(size: int) -> Callable[[Path], AbstractContextManager[Subject]]:
    @contextmanager
    def opened(logs: Path) -> Iterator[Subject]:
        with hosts(size, logs) as ranks:

            def make(named: Any, objective: Any, reference: Any, settings: Any) -> Any:
                given = None if reference is None else GivenModel(tiny_model, reference)
                source = GivenModel(tiny_model, named)
                return ranks.make(source, objective, reference=given, **settings)

            yield Subject(ranks.run, make)

    return opened


MAKERS = [
    pytest.param(single, id="single"),
    pytest.param(fsdp(1), id="fsdp of one rank"),
    pytest.param(fsdp(2), id="fsdp of two ranks", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=MAKERS)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    with request.param(tmp_path_factory.mktemp("logs")) as made:
        yield made


def scored_rows(seed: int = 0, num: int = 12) -> list[Row]:
    """Rows with old and reference log-probs."""
    rows = random_rows(seed, num)
    rng = np.random.default_rng(seed + 100)
    for row in rows:
        length = len(row.tokens_T)
        row.old_logprobs_T = (-4 + 0.3 * rng.normal(size=length)) * row.mask_T
        row.reference_logprobs_T = (-4 + 0.3 * rng.normal(size=length)) * row.mask_T
    return rows


def all_logprobs(model: Any, row: Row) -> torch.Tensor:
    """[T - 1, V], at the row's temperature."""
    ids = torch.tensor(row.tokens_T)[None]
    logits_TV = model(input_ids=ids, use_cache=False).logits[0, :-1] / row.temperature
    return torch.log_softmax(logits_TV, -1)


def plain_loss(model: Any, rows: list[Row]) -> torch.Tensor:
    """That of `FULL`, row by row from whole logits."""
    losses = []
    for row in rows:
        all_TV = all_logprobs(model, row)
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
    return torch.stack(losses).sum()


def test_forward_gives_log_probs_in_order_and_zeros_outside_the_mask(subject: Subject) -> None:
    rows = random_rows()
    trainer = subject.make(0, FULL, reference=3, max_tokens_per_micro_batch=50)
    for head, seed in (("policy", 0), ("reference", 3)):
        model = tiny_model(seed=seed, vocab=VOCAB, dtype=torch.float64)
        found = subject.run(trainer.forward(rows, head))
        for row, found_T in zip(rows, found, strict=True):
            with torch.no_grad():
                picked_T = all_logprobs(model, row)[range(len(row.tokens_T) - 1), row.tokens_T[1:]]
            expected_T = np.concatenate([[0.0], picked_T.numpy()]) * row.mask_T
            np.testing.assert_allclose(found_T, expected_T, rtol=0, atol=1e-9)
            assert not found_T[~row.mask_T].any()
    with pytest.raises(TrainerError, match="no 'values'"):
        subject.run(trainer.forward(rows, "values"))
    assert trainer.version == 0


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_tokens_per_micro_batch": 1}, {"layout": "packed", "max_tokens_per_micro_batch": 40}],
    ids=str,
)
def test_steps_are_those_of_plain_autograd_and_adamw(
    subject: Subject, settings: dict[str, Any]
) -> None:
    """Loss, norm before clipping and updated weights, however the rows are cut."""
    model = tiny_model(vocab=VOCAB, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    trainer = subject.make(0, FULL, reference=7, max_grad_norm=0.05, **settings)
    for step in range(2):
        rows = scored_rows(step, num=8)
        loss = plain_loss(model, rows)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
        metrics, report = subject.learn(trainer, rows)
        assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-9)
        assert metrics["train/trained_tokens"] == sum(int(row.mask_T.sum()) for row in rows)
        assert report.grad_norm == pytest.approx(norm, rel=1e-9)
        assert (report.version, report.lr, report.is_skipped) == (step + 1, 1e-3, False)
        assert trainer.version == step + 1
    found = subject.weights(trainer)
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(found[name], tensor.detach(), rtol=1e-8, atol=1e-10, msg=name)


def test_a_step_that_is_not_finite_raises_the_version_alone(subject: Subject) -> None:
    good = [random_rows(0), random_rows(1)]
    straight = subject.make(0, Grpo(), **SCHEDULE)
    expected = [subject.learn(straight, rows)[1] for rows in good]
    last = subject.bits(straight)

    trainer = subject.make(0, Grpo(), **SCHEDULE)
    first = subject.learn(trainer, good[0])[1]
    before = subject.bits(trainer)
    for where in ("advantages_T", "old_logprobs_T"):
        bad = scored_rows(5)
        getattr(bad[-1], where)[bad[-1].mask_T] = math.nan
        report = subject.learn(trainer, bad)[1]
        assert report.is_skipped
        assert subject.bits(trainer) == before
    assert trainer.version == 3
    # Moments and schedule are as if they had not been there.
    second = subject.learn(trainer, good[1])[1]
    assert (second.version, second.is_skipped) == (4, False)
    for found, report in ((first, expected[0]), (second, expected[1])):
        assert (found.lr, found.grad_norm) == (report.lr, report.grad_norm)
    assert subject.bits(trainer) == last


def test_a_batch_in_which_nothing_is_trained(subject: Subject) -> None:
    rows = random_rows(num=4)
    for row in rows:
        row.mask_T[:] = False
    trainer = subject.make()
    before = subject.bits(trainer)
    metrics, report = subject.learn(trainer, rows)
    assert (metrics["train/loss"], metrics["train/empty_batches"]) == (0.0, 1)
    assert (report.version, report.grad_norm, report.is_skipped) == (1, 0.0, False)
    assert subject.bits(trainer) == before


def test_rows_that_do_not_fit_are_refused_and_it_goes_on(subject: Subject) -> None:
    trainer = subject.make(0, FULL, reference=7)
    rows = scored_rows()
    rows[3].old_logprobs_T = None
    with pytest.raises(TrainerError, match=r"11 of 12 rows.*old_logprobs_T"):
        subject.learn(trainer, rows)
    assert trainer.version == 0
    assert subject.learn(trainer, scored_rows())[1].version == 1


# Checkpoints


@pytest.mark.parametrize(
    ("dtype", "is_later"),
    [(torch.float64, False), (torch.float32, True), (torch.bfloat16, False)],
    ids=["float64", "float32, written later", "bfloat16"],
)
def test_what_was_saved_goes_on_bit_for_bit(
    subject: Subject, tmp_path: Path, dtype: torch.dtype, is_later: bool
) -> None:
    """Case 74 for a trainer: 6 steps, against 3, a save, a load into other weights, and 3. What is
    written later is what was there when it was saved."""
    batches = [random_rows(seed) for seed in range(6)]
    path = tmp_path / "saved"
    path.mkdir()
    straight = subject.make(dtype=dtype, **SCHEDULE)
    found = [subject.learn(straight, rows)[1] for rows in batches[:3]]
    writes: list[Any] = []
    subject.run(straight.save(path, writes.append if is_later else None))
    assert len(writes) == is_later
    found.append(subject.learn(straight, batches[3])[1])
    for write in writes:
        assert not (path / "trainer.json").exists()
        subject.run(write())
    found += [subject.learn(straight, rows)[1] for rows in batches[4:]]
    last = subject.bits(straight)

    resumed = subject.make(5, dtype=dtype, **SCHEDULE)
    subject.learn(resumed, random_rows(9))
    subject.run(resumed.load(path))
    assert resumed.version == 3
    assert [subject.learn(resumed, rows)[1] for rows in batches[3:]] == found[3:]
    assert subject.bits(resumed) == last


def test_a_save_is_a_hugging_face_model_without_pickles(subject: Subject, tmp_path: Path) -> None:
    trainer = subject.make(2, dtype=torch.float32)
    path = subject.save(trainer, tmp_path / "saved")
    files = [file for file in path.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} <= {".json", ".safetensors"}
    assert checksums(load_file(path / "model/model.safetensors")) == subject.bits(trainer)


def test_what_can_not_be_loaded_changes_nothing(subject: Subject, tmp_path: Path) -> None:
    trainer = subject.make()
    subject.learn(trainer, random_rows())
    path = subject.save(trainer, tmp_path / "saved")
    wider = subject.make(0, Grpo(), model={"hidden": 48})
    before = subject.bits(wider)
    with pytest.raises(ResumeMismatchError, match="another model"):
        subject.run(wider.load(path))
    assert (wider.version, subject.bits(wider)) == (0, before)
    damaged = sorted(path.glob("optimizer*.safetensors"))[-1]
    damaged.write_bytes(damaged.read_bytes()[:-40])
    other = subject.make(4)
    before = subject.bits(other)
    with pytest.raises(CheckpointError, match="older checkpoint"):
        subject.run(other.load(path))
    assert (other.version, subject.bits(other)) == (0, before)
    assert subject.learn(other, random_rows())[1].version == 1


# Weights for others


@pytest.mark.parametrize("transport", ["handles", "disk"])
def test_what_is_sent_is_what_it_holds(
    subject: Subject, tmp_path: Path, transport: Transport
) -> None:
    trainer = subject.make(dtype=torch.float32)
    engine = tiny_model(seed=9, vocab=VOCAB)
    for step in range(2):
        subject.learn(trainer, random_rows(step))
        plan = subject.source(trainer, transport, folder=tmp_path / "w", bucket_bytes=9000)
        assert (plan.policy, plan.version, plan.transport) == ("policy", step + 1, transport)
        subject.run(receive_parcels(engine, plan))
        held = named_tensors(engine)
        assert checksums(held) == subject.run(plan.source.checksums())
        some = subject.run(plan.source.numbers(NAMES[:2]))
        assert some.keys() == set(NAMES[:2])
        assert all(torch.equal(tensor, held[name]) for name, tensor in some.items())


def test_weights_are_sent_in_the_type_that_is_asked_for(subject: Subject) -> None:
    trainer = subject.make(dtype=torch.float32)
    expected = checksums({n: t.bfloat16() for n, t in subject.weights(trainer).items()})
    engine = tiny_model(seed=9, vocab=VOCAB, dtype=torch.bfloat16)
    plan = subject.source(trainer, dtype="bfloat16")
    subject.run(receive_parcels(engine, plan))
    assert checksums(named_tensors(engine)) == expected
    assert subject.run(plan.source.checksums()) == expected
    assert {t.dtype for t in subject.run(plan.source.numbers(NAMES)).values()} == {torch.bfloat16}


def test_where_it_stands_changes_no_number(subject: Subject) -> None:
    """Between any two steps; on a CPU there is no other place."""
    straight = subject.make()
    expected = [subject.learn(straight, random_rows(seed)) for seed in range(2)]
    last = subject.bits(straight)
    trainer = subject.make()
    found = []
    for seed in range(2):
        for where in ("host", "host", "device", "device"):
            subject.run(trainer.place(where))
        found.append(subject.learn(trainer, random_rows(seed)))
    assert found == expected
    subject.run(trainer.place("host"))
    assert subject.bits(trainer) == last
