from __future__ import annotations

from contextlib import suppress

import pytest

from paceline.drivers.board import Board, PolicyState


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_says_what_every_policy_does_and_for_how_long() -> None:
    clock = Clock()
    board = Board(["solver", "judge"], "solver", clock)
    clock.now = 103
    board.enter("judge", "learning")
    board.restored("judge", 14)
    board.trained("judge", 15)
    clock.now = 115.5
    assert board.report() == (
        "solver (leader): starting for 15.5 s; trained step 0, published step 0\n"
        "judge: learning for 12.5 s; trained step 15, published step 14"
    )
    assert board["judge"] == PolicyState(trained=15, published=14, phase="learning", since=103)
    assert board.trained_steps() == {"solver": 0, "judge": 15}


def test_a_phase_inside_another_ends_with_the_outer_one_going_on() -> None:
    clock = Clock()
    board = Board(["solver"], "solver", clock)
    board.enter("solver", "saving")
    clock.now = 101
    with suppress(OSError), board.during("solver", "waiting"):
        assert board["solver"].phase == "waiting"
        assert board["solver"].since == 101
        board.trained("solver", 1)
        raise OSError("disk full")
    assert board["solver"] == PolicyState(trained=1, published=0, phase="saving", since=100)


def test_steps_never_go_back() -> None:
    board = Board(["solver"], "solver")
    board.trained("solver", 1)
    board.trained("solver", 3)
    with pytest.raises(ValueError, match="'solver' trained step 3 after step 3"):
        board.trained("solver", 3)
    board.published("solver", 2)
    board.published("solver", 2)
    with pytest.raises(ValueError, match="published step 1; it has trained step 3"):
        board.published("solver", 1)


def test_what_is_not_trained_is_not_published() -> None:
    board = Board(["solver"], "solver")
    board.published("solver", 0)
    with pytest.raises(ValueError, match="'solver' published step 1; it has trained step 0"):
        board.published("solver", 1)


def test_a_leader_has_to_be_a_policy() -> None:
    with pytest.raises(KeyError):
        Board(["solver"], "judge")
