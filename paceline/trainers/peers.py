"""What the processes of one trainer agree on. A trainer of one process agrees with itself."""

from __future__ import annotations

from typing import Protocol


class Peers(Protocol):
    """This process among those that train one model together; each calls the same in turn."""

    @property
    def index(self) -> int:
        """0 for the one that reports what all have in common."""

    def most(self, count: int) -> int:
        """The largest of all."""

    def norm(self, own: float) -> float:
        """L2 norm of a tensor of which each holds a part, from the norms of the parts."""

    def all_true(self, own: bool) -> bool: ...


class Alone:
    """Of a trainer of one process."""

    index = 0

    def most(self, count: int) -> int:
        return count

    def norm(self, own: float) -> float:
        return own

    def all_true(self, own: bool) -> bool:
        return own
