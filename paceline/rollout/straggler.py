"""Groups that take so long that a step waits for them alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from paceline.types import Config


class Straggler(Config):
    """What is done about a group that a step waits for."""

    after_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds that a policy may wait for a group of its next step, counted from when it waits and
    the group is next. Default: any time. The time of an episode as a whole is bounded by
    `rollout.episode_timeout_s`."""
    action: Literal["continue", "drop_group", "truncate"] = "continue"
    """`continue` only counts it. `drop_group` cancels it; its prompt counts as used. That favours
    short answers. `truncate` ends its running answers where they are, as if at
    `sampling.max_tokens`. Counted in `rollout/stragglers`."""


class StragglerWatch:
    """Knows since when each group is waited for."""

    def __init__(self, after_s: float | None) -> None:
        self._after_s = after_s
        self._since: dict[int, float] = {}
        self._found: set[int] = set()

    def late(self, blocking: Iterable[int], now: float) -> list[int]:
        """Of the draws that are waited for now, those that are late; each is named once."""
        if self._after_s is None:
            return []
        self._since = {ordinal: self._since.get(ordinal, now) for ordinal in blocking}
        self._found &= self._since.keys()
        late = [o for o, since in self._since.items() if now >= since + self._after_s]
        new = [ordinal for ordinal in sorted(late) if ordinal not in self._found]
        self._found.update(new)
        return new

    def next_at(self) -> float | None:
        """When the next draw will be late, if it is still waited for."""
        if self._after_s is None:
            return None
        since = [s for ordinal, s in self._since.items() if ordinal not in self._found]
        return min(since) + self._after_s if since else None
