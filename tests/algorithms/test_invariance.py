"""Loss, gradients and metrics do not depend on how a batch is cut, ordered, padded or spread."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from batches import (
    Scored,
    Update,
    make_sample,
    micro_batch,
    random_rollout,
    run_update,
    score_rollout,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.algorithms.base import Algorithm
from paceline.algorithms.grpo import Grpo
from paceline.algorithms.sft import Sft
from paceline.data.packing import plan_micro_batches
from paceline.observe.metrics import Metrics
from paceline.types import Episode, Group, Row, Status

ALGORITHMS: list[Algorithm] = [
    Grpo(kl_coef=0.1, entropy_coef=0.01, dual_clip=1.3),
    Grpo(loss_mean="episode", clip_low=0.1, clip_high=0.3, kl_coef=0.2, kl_estimator="k1"),
    Grpo(loss_mean="constant", constant_tokens=5, normalize="none"),
    Sft(),
    Sft(loss_mean="episode"),
]
algorithms = st.sampled_from(ALGORITHMS)
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def assert_same(found: Update, expected: Update) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=1e-6, abs=1e-12)
    for name in ("grads", "entropy_grads"):
        for a, b in zip(getattr(found, name), getattr(expected, name), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-12)
    assert found.metrics.keys() == expected.metrics.keys()
    for key, value in expected.metrics.items():
        assert found.metrics[key] == pytest.approx(value, rel=1e-6, abs=1e-12), key


def partition(scored: Sequence[Scored], rng: np.random.Generator) -> list[list[Scored]]:
    """Random micro-batches in random order; some may be empty."""
    num = int(rng.integers(1, len(scored) + 2))
    parts: list[list[Scored]] = [[] for _ in range(num)]
    for index in rng.permutation(len(scored)):
        parts[int(rng.integers(num))].append(scored[index])
    return parts


@few
@given(algorithm=algorithms, seed=seeds)
def test_case_3_micro_batches_and_their_order(algorithm: Algorithm, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scored = score_rollout(random_rollout(rng), algorithm, seed)
    whole = run_update(algorithm, scored, [micro_batch(scored)])
    parts = partition(scored, rng)
    assert_same(run_update(algorithm, scored, [micro_batch(p) for p in parts]), whole)


@few
@given(algorithm=algorithms, seed=seeds, max_tokens=st.integers(1, 40))
def test_case_3_packing_by_token_budget(algorithm: Algorithm, seed: int, max_tokens: int) -> None:
    scored = score_rollout(random_rollout(np.random.default_rng(seed)), algorithm, seed)
    whole = run_update(algorithm, scored, [micro_batch(scored)])
    plan = plan_micro_batches([len(s.row.tokens_T) for s in scored], max_tokens)
    packed = [micro_batch([scored[i] for i in rows]) for rows in plan]
    assert_same(run_update(algorithm, scored, packed), whole)


@few
@given(algorithm=algorithms, seed=seeds, num_ranks=st.sampled_from([1, 2, 4]))
def test_case_3_data_parallel_ranks(algorithm: Algorithm, seed: int, num_ranks: int) -> None:
    """Each rank sums its own micro-batches; gradients and partial metrics are then summed."""
    rng = np.random.default_rng(seed)
    scored = score_rollout(random_rollout(rng), algorithm, seed)
    whole = run_update(algorithm, scored, [micro_batch(scored)])
    grads = [np.zeros(len(s.row.tokens_T)) for s in scored]
    entropy_grads = [np.zeros(len(s.row.tokens_T)) for s in scored]
    loss, metrics = 0.0, Metrics()
    for rank in range(num_ranks):
        own = scored[rank::num_ranks]
        parts = [micro_batch(p) for p in partition(own, rng)] if own else [micro_batch([])]
        update = run_update(algorithm, scored, parts)
        loss += update.loss
        for total, part in zip(grads, update.grads, strict=True):
            total += part
        for total, part in zip(entropy_grads, update.entropy_grads, strict=True):
            total += part
        for inputs in parts:
            for name, (value, weight) in algorithm.loss(inputs).means.items():
                metrics.mean(name, value.item(), weight.item())
    assert_same(Update(loss, grads, entropy_grads, metrics.values()), whole)


@few
@given(algorithm=algorithms, seed=seeds)
def test_case_3_and_6_context_parallel_halves(algorithm: Algorithm, seed: int) -> None:
    scored = score_rollout(random_rollout(np.random.default_rng(seed)), algorithm, seed)
    whole = run_update(algorithm, scored, [micro_batch(scored)])
    halves = [micro_batch(scored, slice(0, 2)), micro_batch(scored, slice(2, None))]
    assert_same(run_update(algorithm, scored, halves), whole)


@few
@given(algorithm=algorithms, seed=seeds, num_rows=st.integers(1, 3))
def test_case_7_rows_with_an_empty_mask(algorithm: Algorithm, seed: int, num_rows: int) -> None:
    scored = score_rollout(random_rollout(np.random.default_rng(seed)), algorithm, seed)
    whole = run_update(algorithm, scored, [micro_batch(scored)])
    padding = [empty_row() for _ in range(num_rows)]
    padded = [micro_batch(padding[:1] + list(scored)), micro_batch(padding)]
    assert_same(run_update(algorithm, scored, padded), whole)


def empty_row() -> Scored:
    zeros = np.zeros(4)
    row = Row(
        tokens_T=np.zeros(4, np.int64),
        mask_T=np.zeros(4, np.bool_),
        weights_T=zeros,
        advantages_T=zeros,
        behaviour_logprobs_T=zeros,
        old_logprobs_T=zeros,
        reference_logprobs_T=zeros,
    )
    leaf = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    return Scored(row, leaf, leaf)


@few
@given(algorithm=algorithms, seed=seeds)
def test_case_7_and_32_what_is_not_trained_and_the_order_of_groups(
    algorithm: Algorithm, seed: int
) -> None:
    """Failed episodes, masked siblings, padding tokens, and groups in another order."""
    rng = np.random.default_rng(seed)
    groups = random_rollout(rng)
    scored = score_rollout(groups, algorithm, seed)
    whole = run_update(algorithm, scored, [micro_batch(scored)])
    for group in groups:
        add_what_is_not_trained(group)
    moved = score_rollout([groups[i] for i in rng.permutation(len(groups))], algorithm, seed)
    place = {identity(s): i for i, s in enumerate(moved)}
    changed = run_update(algorithm, moved, [micro_batch(moved)])
    order = [place.pop(identity(s)) for s in scored]
    assert not place
    changed.grads = [changed.grads[i][:-2] for i in order]
    changed.entropy_grads = [changed.entropy_grads[i][:-2] for i in order]
    assert_same(changed, whole)


def add_what_is_not_trained(group: Group) -> None:
    first = group.episodes[0].samples[0]
    sibling = make_sample(first.reward, [False] * 3, prompt_id=group.prompt.id)
    sibling.status = first.status
    group.episodes[0].samples.append(sibling)
    lost = make_sample(None, prompt_id=group.prompt.id, episode=99, status=Status.ABORTED)
    group.episodes.append(Episode(group.prompt.id, 99, [lost]))
    for sample in group.samples():
        sample.tokens += [0, 0]
        sample.mask += [False, False]
        sample.logprobs += [0.0, 0.0]
        sample.versions += [-1, -1]


def identity(scored: Scored) -> tuple[object, ...]:
    row = scored.row
    return (row.episode, *row.behaviour_logprobs_T[row.mask_T].tolist())
