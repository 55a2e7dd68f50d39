"""Loss, gradients and metrics do not depend on how a batch is cut, ordered, padded or spread."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from algorithm_settings import MEANS, NEEDS_WHOLE_ROWS, VARIANTS, make_algorithm
from batches import (
    NUM_TOP,
    Scored,
    Update,
    make_sample,
    micro_batch,
    random_rollout,
    run_update,
    score_rollout,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from paceline.algorithms.base import Algorithm, Objective
from paceline.algorithms.sft import Sft
from paceline.data.packing import plan_micro_batches
from paceline.types import Episode, Group, Row, Status

ALGORITHMS: dict[str, list[Algorithm]] = {
    name: [make_algorithm(name, mean) for mean in MEANS] for name in VARIANTS
}
"""Name -> the algorithm with every mean of its loss."""
ALGORITHMS["sft"] = [Sft(), Sft(loss_mean="episode")]

each = pytest.mark.parametrize("name", ALGORITHMS)
seeds = st.integers(0, 2**32 - 1)
few = settings(
    max_examples=2, deadline=None, derandomize=True, database=None, phases=[Phase.generate]
)


def scored_rollouts(
    name: str, groups: list[Group], seed: int
) -> Iterator[tuple[Objective, list[Scored], Update]]:
    """For every mean: an objective, the rows, and the update of one micro-batch to compare with.

    Where there is a critic, its objective comes after that of the policy.
    """
    for algorithm in ALGORITHMS[name]:
        scored = score_rollout(groups, algorithm, seed)
        for objective in filter(None, [algorithm, algorithm.critic]):
            yield objective, scored, run_update(objective, scored, [micro_batch(scored)])


def assert_same(found: Update, expected: Update) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=1e-6, abs=1e-12)
    for name, arrays in expected.gradients.items():
        assert [a.shape for a in found.gradients[name]] == [a.shape for a in arrays]
        both = [np.concatenate(rows) for rows in (found.gradients[name], arrays) if rows]
        np.testing.assert_allclose(*(both or ([], [])), rtol=1e-6, atol=1e-12)
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


@each
@few
@given(seed=seeds)
def test_case_3_micro_batches_and_their_order(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for objective, scored, whole in scored_rollouts(name, random_rollout(rng), seed):
        parts = [micro_batch(part) for part in partition(scored, rng)]
        assert_same(run_update(objective, scored, parts), whole)


@each
@few
@given(seed=seeds, max_tokens=st.integers(1, 40))
def test_case_3_packing_by_token_budget(name: str, seed: int, max_tokens: int) -> None:
    groups = random_rollout(np.random.default_rng(seed))
    for objective, scored, whole in scored_rollouts(name, groups, seed):
        plan = plan_micro_batches([len(s.row.tokens_T) for s in scored], max_tokens)
        packed = [micro_batch([scored[i] for i in rows]) for rows in plan]
        assert_same(run_update(objective, scored, packed), whole)


@each
@few
@given(seed=seeds, num_ranks=st.sampled_from([2, 4]))
def test_case_3_data_parallel_ranks(name: str, seed: int, num_ranks: int) -> None:
    """Each rank sums its own micro-batches; gradients and partial metrics are then summed."""
    rng = np.random.default_rng(seed)
    for objective, scored, whole in scored_rollouts(name, random_rollout(rng), seed):
        total = Update(gradients={k: [0 * a for a in v] for k, v in whole.gradients.items()})
        for rank in range(num_ranks):
            own = scored[rank::num_ranks]
            parts = [micro_batch(p) for p in partition(own, rng)] if own else [micro_batch([])]
            update = run_update(objective, scored, parts)
            total.loss += update.loss
            total.partial.merge(update.partial)
            for leaf, arrays in update.gradients.items():
                for a, b in zip(total.gradients[leaf], arrays, strict=True):
                    a += b
        assert_same(total, whole)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in NEEDS_WHOLE_ROWS])
@few
@given(seed=seeds)
def test_case_3_and_6_context_parallel_halves(name: str, seed: int) -> None:
    """Rows may be cut where no ratio is that of a whole sequence."""
    groups = random_rollout(np.random.default_rng(seed))
    for objective, scored, whole in scored_rollouts(name, groups, seed):
        halves = [micro_batch(scored, slice(*ends)) for ends in pairwise([0, 2, None])]
        assert_same(run_update(objective, scored, halves), whole)


@each
@few
@given(seed=seeds, num_rows=st.integers(1, 3))
def test_case_7_rows_with_an_empty_mask(name: str, seed: int, num_rows: int) -> None:
    padding = [empty_row() for _ in range(num_rows)]
    groups = random_rollout(np.random.default_rng(seed))
    for objective, scored, whole in scored_rollouts(name, groups, seed):
        padded = [micro_batch(padding[:1] + list(scored)), micro_batch(padding)]
        assert_same(run_update(objective, scored, padded), whole)


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
        values_T=zeros,
        returns_T=zeros,
        teacher_logprobs_T=zeros,
        teacher_top_logprobs_TK=np.zeros((4, NUM_TOP)),
    )
    leaf = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    return Scored(row, leaf, leaf, leaf, leaf.new_zeros(4, NUM_TOP))


@each
@few
@given(seed=seeds)
def test_case_7_and_32_what_is_not_trained_and_the_order_of_groups(name: str, seed: int) -> None:
    """Failed episodes, masked siblings, padding tokens, and groups in another order."""
    rng = np.random.default_rng(seed)
    groups = random_rollout(rng)
    before = list(scored_rollouts(name, groups, seed))
    for group in groups:
        add_what_is_not_trained(group)
    moved = [groups[i] for i in rng.permutation(len(groups))]
    after = scored_rollouts(name, moved, seed)
    for (_, rows, whole), (_, moved_rows, changed) in zip(before, after, strict=True):
        place = {identity(s): i for i, s in enumerate(moved_rows)}
        order = [place.pop(identity(s)) for s in rows]
        assert not place
        for leaf, arrays in changed.gradients.items():
            changed.gradients[leaf] = [arrays[i][:-2] for i in order]
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
