"""Every algorithm against a second implementation: loops over numbers, nothing shared."""

import numpy as np
import pytest
from algorithm_settings import MEANS_OF, VARIANTS, make_algorithm
from batches import Scored, Update, micro_batch, random_rollout, run_update, score_rollout
from loops import Expected, expected_update

from paceline.algorithms import ALGORITHMS
from paceline.algorithms.base import Algorithm

SEEDS = range(2)
WITHOUT_CLIP = {"cispo", "correction, token mask", "distill, top k of the teacher"}
"""Bounds too wide to reach, or advantages of 0."""


def scored_rollout(algorithm: Algorithm, seed: int) -> tuple[list[Scored], Expected]:
    groups = random_rollout(np.random.default_rng(seed), num_groups=4)
    scored = score_rollout(groups, algorithm, seed)
    return scored, expected_update(algorithm, groups, scored)


def assert_gradients(update: Update, leaf: str, expected: dict[tuple[int, int], object]) -> None:
    slopes = [np.zeros(found.shape) for found in update.gradients[leaf]]
    for (row, t), slope in expected.items():
        slopes[row][t] = slope
    found, wanted = np.concatenate(update.gradients[leaf]), np.concatenate(slopes)
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12, err_msg=leaf)


@pytest.mark.parametrize(("name", "mean"), MEANS_OF)
def test_loss_and_gradients_match_the_loops(name: str, mean: str) -> None:
    algorithm = make_algorithm(name, mean)
    for seed in SEEDS:
        scored, expected = scored_rollout(algorithm, seed)
        update = run_update(algorithm, scored, [micro_batch(scored)])
        assert update.loss == pytest.approx(expected.loss, rel=1e-10, abs=1e-12)
        assert_gradients(update, "logprobs", expected.logprobs)
        assert_gradients(update, "top_logprobs", expected.top_logprobs)
        if algorithm.needs_entropy_gradient:
            assert_gradients(update, "entropy", expected.entropy)
        share = expected.num_clipped / expected.num_tokens
        assert update.metrics["clip_fraction"] == pytest.approx(share)


@pytest.mark.parametrize("name", VARIANTS)
def test_advantages_and_returns_match_the_loops(name: str) -> None:
    algorithm = make_algorithm(name)
    for seed in range(5):
        scored, expected = scored_rollout(algorithm, seed)
        for r, one in enumerate(scored):
            columns = [(one.row.advantages_T, expected.advantages)]
            if algorithm.critic is not None:
                columns.append((one.row.returns_T, expected.returns))
            for column_T, numbers in columns:
                wanted = [numbers.get((r, t), 0.0) for t in range(len(column_T))]
                np.testing.assert_allclose(column_T, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("name", "mean"), [pair for pair in MEANS_OF if "ppo" in pair[0]])
def test_the_loss_of_the_critic_matches_the_loops(name: str, mean: str) -> None:
    algorithm = make_algorithm(name, mean)
    assert algorithm.critic is not None
    for seed in SEEDS:
        scored, expected = scored_rollout(algorithm, seed)
        update = run_update(algorithm.critic, scored, [micro_batch(scored)])
        assert update.loss == pytest.approx(expected.critic_loss, rel=1e-10)
        assert_gradients(update, "values", expected.values)
        assert_gradients(update, "logprobs", {})


def test_every_algorithm_that_learns_from_rollouts_has_a_reference() -> None:
    kinds = {kind for kind, make in ALGORITHMS.items() if make().learns_from_rollouts}
    assert {kind for kind, _ in VARIANTS.values()} == kinds


@pytest.mark.parametrize("name", VARIANTS)
def test_the_random_rollouts_reach_every_branch(name: str) -> None:
    """Clipped and free tokens, held and free values, bounded and vetoed weights."""
    algorithm = make_algorithm(name)
    num_clipped = num_tokens = 0
    weights: set[float] = set()
    slopes: set[bool] = set()
    for seed in SEEDS:
        _, expected = scored_rollout(algorithm, seed)
        num_clipped += expected.num_clipped
        num_tokens += expected.num_tokens
        weights |= set(expected.corrections.values())
        slopes |= {slope != 0 for slope in expected.values.values()}
    assert num_clipped < num_tokens
    assert num_clipped > 0 or name in WITHOUT_CLIP
    if algorithm.correction is not None:
        assert len(weights) > 2
        has_zero = algorithm.correction.mode == "mask" or algorithm.correction.veto is not None
        assert (0.0 in weights) == has_zero
    if algorithm.critic is not None:
        assert slopes == ({True} if algorithm.value_clip is None else {True, False})
