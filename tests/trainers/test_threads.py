"""The choice of CPU threads: quick, obedient, without traces."""

from __future__ import annotations

import torch

from paceline.trainers import threads


def test_the_environment_decides(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads.choose_threads() == 3


def test_more_threads_must_be_clearly_faster(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "available_cores", lambda: 4)
    times = {1: 1.0, 4: 0.95}
    monkeypatch.setattr(threads, "_time_step_s", lambda n, hidden, tokens: times[n])
    assert threads.choose_threads() == 1
    times[4] = 0.5
    assert threads.choose_threads() == 4


def test_one_core_needs_no_measurement(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "available_cores", lambda: 1)
    monkeypatch.setattr(threads, "_time_step_s", lambda *_: 1 / 0)
    assert threads.choose_threads() == 1


def test_measurement_leaves_the_setting_as_it_was(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "available_cores", lambda: 2)
    before = torch.get_num_threads()
    assert threads.choose_threads(hidden=16, tokens=32) in (1, 2)
    assert torch.get_num_threads() == before


def test_a_measurement_ends_by_its_budget(monkeypatch):
    """Counted in steps of a clock that advances by what a slow machine would need."""
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.03
        return now_s

    monkeypatch.setattr(threads.time, "perf_counter", clock)
    before = torch.get_num_threads()
    try:
        threads._time_step_s(1, 8, 8)
    finally:
        torch.set_num_threads(before)
    assert now_s < threads.BUDGET_S
