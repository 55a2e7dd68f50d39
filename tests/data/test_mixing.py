from __future__ import annotations

from fractions import Fraction
from math import ceil, floor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.mixing import Mixture


def sequence(weights: list[float], n: int) -> list[int]:
    mixture, drawn, found = Mixture(weights), [0] * len(weights), []
    for _ in range(n):
        source = mixture.next(drawn)
        drawn[source] += 1
        found.append(source)
    return found


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1], [0, 0, 0]),
        ([2, 1], [0, 0, 1, 0, 0, 1]),
        ([1, 1], [0, 1, 0, 1]),
        ([1, 3], [1, 1, 0, 1, 1, 1, 0, 1]),
        ([0.7, 0.1, 0.2], [0, 0, 0, 2, 0, 0, 1, 0, 0, 2]),
    ],
)
def test_sequences(weights, expected):
    assert sequence(weights, len(expected)) == expected


@settings(derandomize=True)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_every_source_keeps_to_its_quota_at_every_moment(weights):
    drawn = [0] * len(weights)
    total = sum(weights)
    for t, source in enumerate(sequence(weights, 2 * total + 3), start=1):
        drawn[source] += 1
        for weight, count in zip(weights, drawn, strict=True):
            quota = Fraction(t * weight, total)
            assert floor(quota) <= count <= ceil(quota)


def test_weights_count_relative_to_each_other():
    assert sequence([0.3, 0.1], 40) == sequence([3, 1], 40) == sequence([1.5, 0.5], 40)
