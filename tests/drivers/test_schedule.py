from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drivers.schedule import SaveRequest, due


@given(st.integers(1, 100), st.booleans(), st.booleans(), st.sampled_from([None, "never"]))
def test_without_an_interval_nothing_is_ever_due(
    step: int, epoch_ended: bool, last: bool, every: None
) -> None:
    assert not due(step, every, epoch_ended, last)


@given(st.integers(1, 100), st.integers(1, 20), st.booleans(), st.booleans())
def test_each_kth_step_each_end_of_an_epoch_and_the_last(
    step: int, every: int, epoch_ended: bool, last: bool
) -> None:
    assert due(step, every, epoch_ended, last) == (step % every == 0 or epoch_ended or last)


def test_a_run_of_seven_steps_every_three() -> None:
    assert [step for step in range(1, 8) if due(step, 3, last=step == 7)] == [3, 6, 7]


@pytest.mark.parametrize(("step", "every"), [(0, 1), (1, 0)])
def test_counts_start_at_one(step: int, every: int) -> None:
    with pytest.raises(ValueError, match="found 0"):
        due(step, every)


def test_a_request_is_claimed_and_gone_when_it_is_durable(tmp_path: Path) -> None:
    request = SaveRequest(tmp_path / "save")
    assert not request.claim()
    (tmp_path / "save").touch()
    assert request.claim()
    assert [p.name for p in tmp_path.iterdir()] == ["save.claimed"]
    request.acknowledge()
    assert list(tmp_path.iterdir()) == []
    assert not request.claim()


def test_a_second_touch_during_the_save_is_not_lost(tmp_path: Path) -> None:
    request = SaveRequest(tmp_path / "save")
    (tmp_path / "save").touch()
    assert request.claim()
    (tmp_path / "save").touch()
    request.acknowledge()
    assert request.claim()
    request.acknowledge()
    assert not request.claim()


def test_the_next_run_honours_what_a_crashed_one_claimed(tmp_path: Path) -> None:
    (tmp_path / "save").touch()
    assert SaveRequest(tmp_path / "save").claim()
    after_the_crash = SaveRequest(tmp_path / "save")
    assert after_the_crash.claim()
    (tmp_path / "save").touch()
    assert after_the_crash.claim(), "two requests, one save"
    after_the_crash.acknowledge()
    assert not after_the_crash.claim()


def test_without_a_path_there_is_no_request() -> None:
    request = SaveRequest(None)
    assert not request.claim()
    request.acknowledge()
