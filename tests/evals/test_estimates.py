"""Confidence intervals and pass@k against known numbers and against brute force."""

import itertools
import math
import random
import statistics

import pytest

from paceline.evals.estimates import estimate, pass_at_k, t_975, wilson_interval


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (29, 2.04523)],
)
def test_quantiles_of_t(degrees: int, expected: float) -> None:
    assert t_975(degrees) == pytest.approx(expected, rel=2e-3)
    assert t_975(10**6) == pytest.approx(1.959964, abs=1e-5)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 10, 0.0, 0.27753), (10, 10, 0.72247, 1.0), (3, 10, 0.10779, 0.60323), (0, 1, 0, 0.79345)],
)
def test_wilson(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=1e-5)


def test_a_mean_of_zeros_and_ones_gets_wilsons_interval() -> None:
    found = estimate([1.0] * 3 + [0.0] * 7)
    assert found.value == pytest.approx(0.3)
    assert (found.low, found.high) == wilson_interval(3, 10)
    assert found.standard_error == pytest.approx(math.sqrt(0.3 * 0.7 / 9))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_all_right_or_all_wrong_is_not_certain(value: float) -> None:
    found = estimate([value] * 20)
    assert found.value == value
    assert found.low is not None
    assert found.high is not None
    assert found.high - found.low == pytest.approx(0.16113, abs=1e-5)


def test_other_means_get_students_interval_over_prompts() -> None:
    values = [0.25, 0.5, 1.0, 0.75]
    found = estimate(values)
    error = statistics.stdev(values) / 2
    assert found.value == 0.625
    assert found.standard_error == pytest.approx(error)
    assert found.low == pytest.approx(0.625 - t_975(3) * error)
    assert found.high == pytest.approx(0.625 + t_975(3) * error)
    share = estimate(values, is_share=True)
    assert (share.low, share.high) == (pytest.approx(found.low), 1.0)


def test_the_interval_is_the_cluster_robust_one() -> None:
    """Sandwich estimator of the mean with prompts as clusters, written out."""
    answers = [[1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0, 1, 0, 0]]
    every = [a for prompt in answers for a in prompt]
    mean = sum(every) / len(every)
    scores = [sum(a - mean for a in prompt) for prompt in answers]
    num = len(answers)
    variance = num / (num - 1) * sum(s * s for s in scores) / len(every) ** 2
    found = estimate([statistics.fmean(prompt) for prompt in answers])
    assert found.value == pytest.approx(mean)
    assert found.standard_error == pytest.approx(math.sqrt(variance))


def test_one_prompt_or_none() -> None:
    found = estimate([0.4])
    assert (found.value, found.standard_error, found.low, found.high) == (0.4, None, None, None)
    assert estimate([1.0]).low == pytest.approx(0.20655, abs=1e-5)
    with pytest.raises(ValueError, match="no prompts"):
        estimate([])


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = random.Random(0)
    hits = 0
    for _ in range(400):
        abilities = [rng.betavariate(1, 2) for _ in range(25)]
        found = estimate([sum(rng.random() < a for _ in range(4)) / 4 for a in abilities])
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 1 / 3 <= found.high
    assert 0.92 <= hits / 400 <= 0.98


@pytest.mark.parametrize("num_answers", [1, 2, 5])
def test_pass_at_k_is_the_mean_over_all_subsets(num_answers: int) -> None:
    for passed in range(num_answers + 1):
        answers = [i < passed for i in range(num_answers)]
        for k in range(1, num_answers + 1):
            subsets = list(itertools.combinations(answers, k))
            exact = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(num_answers, passed, k) == pytest.approx(exact, abs=1e-15)


def test_pass_at_k_values() -> None:
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(10, 3, 5) == pytest.approx(1 - 21 / 252)
    assert pass_at_k(200, 1, 100) == pytest.approx(0.5)
    assert pass_at_k(10000, 1, 1) == pytest.approx(1e-4)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 2), (4, -1, 2)])
def test_pass_at_k_refuses_what_can_not_be_known(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="can not"):
        pass_at_k(n, c, k)
