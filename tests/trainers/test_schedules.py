"""Learning rates as literal numbers."""

from __future__ import annotations

import pytest

from paceline.trainers.schedules import learning_rate


def _rates(shape: str, **settings: float) -> list[float]:
    return [learning_rate(k, peak=1.0, shape=shape, **{"horizon": 6, **settings}) for k in range(8)]


def test_constant_with_warm_up():
    assert _rates("constant", warmup=4) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]


def test_constant_without_warm_up():
    assert _rates("constant") == [1] * 8


def test_linear_falls_to_its_least_at_the_horizon_and_stays():
    expected = [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]
    assert _rates("linear", warmup=2) == expected
    assert _rates("linear", warmup=2, min_ratio=0.2) == pytest.approx(
        [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]
    )


def test_cosine():
    expected = [1, 0.9330127, 0.75, 0.5, 0.25, 0.0669873, 0, 0]
    assert _rates("cosine") == pytest.approx(expected, abs=1e-7)
    assert _rates("cosine", min_ratio=0.5)[3] == pytest.approx(0.75)


def test_warm_up_as_long_as_the_run_is_a_ramp():
    assert _rates("linear", warmup=6)[:6] == pytest.approx([k / 6 for k in range(1, 7)])
    assert _rates("linear", warmup=6)[6:] == [1, 0]


def test_peak_scales_it():
    assert learning_rate(0, peak=3e-4, shape="linear", horizon=10) == 3e-4
    assert learning_rate(5, peak=3e-4, shape="linear", horizon=10) == pytest.approx(1.5e-4)
