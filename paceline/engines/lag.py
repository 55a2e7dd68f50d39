"""How late this process's own event loop is: what seems slow to it may be on time."""

from __future__ import annotations

import asyncio
import math
from collections import deque

TICK_S = 0.25
KEPT_S = 120.0
"""Seconds of the past that are remembered: more than a look at a server may take."""


class Lag:
    """Sleeps a little, again and again, and notes by how much each sleep was too long."""

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque(maxlen=int(KEPT_S / TICK_S))
        """When a sleep ended, and by how much too late."""
        self._due = math.inf
        """When the sleep that is under way should end."""

    async def measure(self) -> None:
        """Goes on until it is cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            self._due = clock() + TICK_S
            await asyncio.sleep(TICK_S)
            self._late.append((clock(), clock() - self._due))

    def share_since(self, start: float) -> float:
        """Of the time since then, the share by which sleeps were too long: 0 where the loop is
        idle, near 1 where it hardly comes to anything. start: by the clock of the loop."""
        now = asyncio.get_running_loop().time()
        late_s = max(0.0, min(now - self._due, now - start))
        for ended, by in reversed(self._late):
            if ended < start:
                break
            late_s += min(by, ended - start)
        return late_s / max(now - start, TICK_S)
