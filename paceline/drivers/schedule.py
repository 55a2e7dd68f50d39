"""When something is due, and a save that is asked for by touching a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal


def due(
    step: int,
    every: int | Literal["never"] | None,
    epoch_ended: bool = False,
    last: bool = False,
) -> bool:
    """True after each `every`-th step, at each epoch's end and after the last step.

    Steps are 1-based. Without `every` it is never true, not even after the last step.

    Example: due(4, 2) and due(5, 2, last=True), but not due(5, 2) nor due(5, None, last=True).
    """
    if step < 1:
        raise ValueError(f"steps are counted from 1, found {step}")
    if every is None or every == "never":
        return False
    if every < 1:
        raise ValueError(f"every must be at least 1, found {every}")
    return last or epoch_ended or step % every == 0


class SaveRequest:
    """A save asked for from outside: somebody touches `path`.

    `claim` moves the file to `<path>.claimed` in one rename, so a touch during the save makes a
    new request instead of being lost. `acknowledge` removes the claimed file once the checkpoint is
    durable: when neither file is there, nothing is due. A claimed file that a crashed run left is
    a request of the next one.

    From `serve` to `acknowledge` a save is under way, maybe in the background: it answers what was
    claimed before, and a touch meanwhile is a request that is claimed after it.
    """

    def __init__(self, path: Path | None) -> None:
        """With None there never is a request."""
        self.path = path
        self.claimed_path = None if path is None else path.with_name(f"{path.name}.claimed")
        self._is_served = False

    def claim(self) -> bool:
        """True if a save is due; the request is ours from now on, or after the save under way."""
        if self.path is None or self.claimed_path is None:
            return False
        if self._is_served:
            return self.path.exists()
        try:
            os.replace(self.path, self.claimed_path)
        except FileNotFoundError:
            return self.claimed_path.exists()
        return True

    def serve(self) -> None:
        """A save begins, which answers what was asked for so far."""
        self.claim()
        self._is_served = True

    def acknowledge(self) -> None:
        """The checkpoint is durable."""
        self._is_served = False
        if self.claimed_path is not None:
            self.claimed_path.unlink(missing_ok=True)
