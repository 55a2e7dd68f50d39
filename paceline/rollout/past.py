"""Earlier selves of a policy that play against it: copies made while the run goes on.

published(step)  every k-th step: copy the weights, put them into the pool, drop the oldest
learned(groups)  rate everybody by the games of the step
save, load       the copies and the table belong to the checkpoint
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch

from paceline.errors import CheckpointError
from paceline.models import writable
from paceline.observe.files import REAL_FILES, encode_json
from paceline.observe.metrics import Metrics
from paceline.rollout.actor import Seat
from paceline.rollout.elo import START, EloTable
from paceline.rollout.seats import SeatPool
from paceline.trainers.background import in_thread
from paceline.trainers.base import Later
from paceline.types import Episode, Group

if TYPE_CHECKING:
    from torch import nn

TABLE_FILE = "elo.json"


@dataclass(frozen=True, slots=True)
class PastSelf:
    """A copy of a policy's weights, with the engine that serves it."""

    seat: Seat
    module: nn.Module
    close: Callable[[], Awaitable[None]]


class PastSelves:
    """The pool of one role, and who is how strong."""

    def __init__(
        self,
        policy: str,
        role: str,
        pool: SeatPool,
        *,
        every: int,
        copy: Callable[[str], PastSelf],
        table_path: Path | None = None,
    ) -> None:
        """
        Args:
            policy: whose earlier selves these are.
            role: that they play.
            every: steps of the policy from one copy to the next.
            copy: label -> a copy of the weights as they are now.
            table_path: where the table is kept for people to read.
        """
        self.role = role
        self.pool = pool
        self.elo = EloTable()
        self.policy = policy
        self._every = every
        self._copy = copy
        self._table_path = table_path
        self._selves: dict[str, PastSelf] = {}
        self._retired: list[PastSelf] = []
        """Out of the pool; an episode that began before may still ask them until the next copy."""

    async def published(self, step: int) -> None:
        """A copy is made of what is served from this step on, if one is due."""
        label = f"step-{step}"
        if step % self._every == 0 and label not in self._selves:
            self_ = self._copy(label)
            await self._add(label, self_)
            self.elo.inherit(self_.seat.policy, self.policy)

    async def _add(self, label: str, self_: PastSelf) -> None:
        await self._close_retired()
        self._selves[label] = self_
        for seat in self.pool.add(label, self_.seat):
            gone = next(name for name, kept in self._selves.items() if kept.seat is seat)
            self._retired.append(self._selves.pop(gone))

    async def _close_retired(self) -> None:
        while self._retired:
            await self._retired.pop().close()

    def learned(self, groups: Sequence[Group]) -> Metrics:
        """Rate the games of a step, in the order of their draws."""
        for group in groups:
            for episode in group.episodes:
                self._rate(episode)
        if self._table_path is not None:
            rows = [
                {"player": name, "rating": round(rating, 1), "games": games}
                for name, rating, games in self.elo.table()
            ]
            REAL_FILES.write(self._table_path, encode_json(rows, indent=1))
        metrics = Metrics()
        metrics.mean("rollout/elo", self.elo.ratings.get(self.policy, START))
        return metrics

    def _rate(self, episode: Episode) -> None:
        """Only where both sides have a reward is it a game; the higher one has won."""
        own = [s.reward for s in episode.samples if s.policy == self.policy]
        theirs = [s for s in episode.others if s.role == self.role]
        if not own or not theirs or own[0] is None or theirs[0].reward is None:
            return
        gap = own[0] - theirs[0].reward
        score = 0.5 if gap == 0 else float(gap > 0)
        self.elo.play(self.policy, theirs[0].policy, score)

    def module(self, label: str) -> nn.Module:
        """The weights of one of them."""
        return self._selves[label].module

    async def save(self, folder: Path, later: Later | None = None) -> None:
        """Write the copies and the table into a new folder; durable on return.

        later: given, nothing is written before what it gets is awaited, and then what there is now.
        """
        modules = {label: self_.module for label, self_ in self._selves.items()}
        table = encode_json(self.elo.state())

        def write() -> None:
            folder.mkdir(parents=True)
            with writable(folder):
                for label, module in modules.items():  # whose weights never change
                    safetensors.torch.save_model(module, str(folder / f"{label}.safetensors"))
            REAL_FILES.write(folder / TABLE_FILE, table)
            for path in sorted(folder.iterdir()):
                REAL_FILES.sync(path)

        if later is None:
            write()
        else:
            later(lambda: in_thread("checkpoint", write))

    async def load(self, folder: Path) -> None:
        """Bring back what `save` wrote. Raises CheckpointError if it is not there or damaged."""
        try:
            self.elo.restore(json.loads((folder / TABLE_FILE).read_text()))
            files = sorted(folder.glob("step-*.safetensors"), key=_step)
            for file in files:
                self_ = self._copy(file.stem)
                await self._add(file.stem, self_)
                safetensors.torch.load_model(self_.module, str(file))
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the earlier selves of {self.policy!r} in {folder} can not be read: {error}"
            ) from error

    async def aclose(self) -> None:
        await self._close_retired()
        while self._selves:
            _, self_ = self._selves.popitem()
            await self_.close()


def _step(file: Path) -> int:
    return int(file.stem.partition("-")[2])
