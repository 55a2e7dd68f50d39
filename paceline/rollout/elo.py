"""Ratings of a policy and its earlier selves, from the games they play. A. Elo, 1978.

    expected score of A against B = 1 / (1 + 10 ^ ((R_B - R_A) / 400))
    R_A <- R_A + K (score - expected)        R_B <- R_B - K (score - expected)

A score is 1 for a win, 0.5 for a draw, 0 for a loss. What a rating means is only its difference to
another one: 200 points are an expected score of 0.76.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import CheckpointError
from paceline.types import JsonValue

START = 1000.0
SCALE = 400.0


class EloTable:
    """Rating and number of games by player."""

    def __init__(self, k: float = 8.0) -> None:
        """k: most points that one game moves a rating by."""
        self._k = k
        self.ratings: dict[str, float] = {}
        self.games: dict[str, int] = {}

    def expected(self, player: str, other: str) -> float:
        """Expected score of the first against the second."""
        gap = self.ratings.get(other, START) - self.ratings.get(player, START)
        return float(1.0 / (1.0 + 10.0 ** (gap / SCALE)))

    def play(self, player: str, other: str, score: float) -> None:
        """Take in one game. Raises ValueError unless the score is from 0 to 1."""
        if not 0.0 <= score <= 1.0:
            raise ValueError(f"a score is from 0 (lost) to 1 (won), found {score}")
        change = self._k * (score - self.expected(player, other))
        for name, sign in ((player, 1.0), (other, -1.0)):
            self.ratings[name] = self.ratings.get(name, START) + sign * change
            self.games[name] = self.games.get(name, 0) + 1

    def inherit(self, heir: str, player: str) -> None:
        """A copy of a player begins with the rating that the player has now."""
        self.ratings[heir] = self.ratings.get(player, START)
        self.games.setdefault(heir, 0)

    def table(self) -> list[tuple[str, float, int]]:
        """(player, rating, games), the best first."""
        rows = [(name, rating, self.games.get(name, 0)) for name, rating in self.ratings.items()]
        return sorted(rows, key=lambda row: (-row[1], row[0]))

    def state(self) -> dict[str, JsonValue]:
        return {"ratings": dict(self.ratings), "games": dict(self.games)}

    def restore(self, state: Mapping[str, Any]) -> None:
        try:
            self.ratings = {str(name): float(rating) for name, rating in state["ratings"].items()}
            self.games = {str(name): int(count) for name, count in state["games"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the saved Elo table is damaged: {error!r}") from error
