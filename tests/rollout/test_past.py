"""Earlier selves: the pool they make, their ratings, and what a checkpoint keeps of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from tiny import tiny_model

from paceline.errors import CheckpointError
from paceline.rollout.actor import Seat
from paceline.rollout.elo import EloTable
from paceline.rollout.past import PastSelf, PastSelves
from paceline.rollout.seats import SeatPool
from paceline.types import Episode, Group, Prompt, Sample, Status


class Selves:
    """A policy of one number, and the copies that were made of it."""

    def __init__(self, keep: int = 2, every: int = 2) -> None:
        self.model = tiny_model()
        self.closed: list[str] = []
        self.pool = SeatPool(keep)
        self.past = PastSelves("me", "other", self.pool, every=every, copy=self.copy)

    def copy(self, label: str) -> PastSelf:
        module = tiny_model()
        module.load_state_dict(self.model.state_dict())

        async def close() -> None:
            self.closed.append(label)

        seat = Seat(f"me@{label}", None, None, None, learns=False, label=label)  # type: ignore[arg-type]
        return PastSelf(seat, module, close)

    def change(self, value: float) -> None:
        with torch.no_grad():
            self.model.model.embed_tokens.weight.fill_(value)


def test_the_newest_are_kept_and_the_oldest_closed_a_copy_later() -> None:
    selves = Selves()

    async def body() -> None:
        for step in range(7):
            await selves.past.published(step)
        assert selves.pool.labels == ["step-4", "step-6"]
        assert selves.closed == ["step-0"]  # step-2 may still be asked
        await selves.past.aclose()
        assert sorted(selves.closed) == ["step-0", "step-2", "step-4", "step-6"]

    asyncio.run(body())


def test_publishing_a_step_again_copies_nothing() -> None:
    selves = Selves()

    async def body() -> None:
        await selves.past.published(2)
        await selves.past.published(2)
        assert selves.pool.labels == ["step-2"]

    asyncio.run(body())


def test_copies_and_ratings_come_back_bit_for_bit(tmp_path: Path) -> None:
    selves, again = Selves(), Selves()

    async def body() -> None:
        for step, value in ((0, 1.0), (2, 2.0)):
            selves.change(value)
            await selves.past.published(step)
        selves.past.learned([game(1.0, 0.0), game(0.0, 1.0), game(1.0, 1.0)])
        await selves.past.save(tmp_path / "past")
        again.change(9.0)
        await again.past.load(tmp_path / "past")
        assert again.pool.labels == ["step-0", "step-2"]
        for label in again.pool.labels:
            one, other = selves.past.module(label), again.past.module(label)
            for name, tensor in one.state_dict().items():
                assert torch.equal(tensor, other.state_dict()[name])
        assert again.past.elo.state() == selves.past.elo.state()

    asyncio.run(body())


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="earlier selves of 'me'"):
        asyncio.run(Selves().past.load(tmp_path / "nothing"))


def game(own: float, other: float | None, label: str = "step-0") -> Group:
    def sample(policy: str, role: str, reward: float | None) -> Sample:
        return Sample(
            policy, "p", 0, [1, 2], [False, True], [0.0, -1.0], [-1, 0],
            Status.COMPLETED, role=role, reward=reward,
        )  # fmt: skip

    mine = sample("me", "me", own)
    theirs = sample(f"me@{label}", "other", other)
    return Group(Prompt("p", text="x"), [Episode("p", 0, [mine], others=[theirs])])


def test_a_win_moves_points_from_the_loser_to_the_winner() -> None:
    selves = Selves()
    metrics = selves.past.learned([game(1.0, 0.0)])
    ratings = selves.past.elo.ratings
    assert ratings == {"me": 1004.0, "me@step-0": 996.0}
    assert metrics.values()["rollout/elo"] == 1004.0
    selves.past.learned([game(1.0, None)])  # no game: one side has no reward
    assert selves.past.elo.ratings == ratings


def test_expected_scores_are_those_of_the_formula() -> None:
    table = EloTable(k=32)
    table.ratings = {"a": 1200.0, "b": 1000.0}
    assert table.expected("a", "b") == pytest.approx(0.759747)
    table.play("b", "a", 1.0)
    assert table.ratings["b"] == pytest.approx(1000 + 32 * 0.759747, abs=1e-3)
    assert sum(table.ratings.values()) == pytest.approx(2200)
    with pytest.raises(ValueError, match="from 0"):
        table.play("a", "b", 2.0)


def test_a_copy_inherits_the_rating() -> None:
    table = EloTable()
    table.play("a", "b", 1.0)
    table.inherit("a2", "a")
    assert table.ratings["a2"] == table.ratings["a"]
    assert table.table()[-1][0] == "b"
    with pytest.raises(CheckpointError, match="damaged"):
        table.restore({"ratings": 3})
