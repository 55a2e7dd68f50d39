"""What the run file of a simulated run would say, by seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Pace:
    """One policy's settings."""

    batch: int
    max_staleness: int
    publish_every: int
    on_full: str
    max_lead: int | None
    is_shared: bool

    @property
    def runs_ahead(self) -> bool:
        return self.max_staleness > 0 or self.on_full == "drop_oldest"


@dataclass
class Settings:
    """By seed; the first policy is the leader."""

    seed: int
    paces: dict[str, Pace] = field(init=False)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.is_deterministic = rng.random() < 0.25
        self.paces = {
            name: self._pace(rng, is_leader=name == "a")
            for name in "abcd"[: rng.choice([1, 2, 2, 2, 3, 3, 4])]
        }
        for names in self.feeds.values():
            if all(self.paces[name].on_full == "drop_oldest" for name in names):
                self.paces[names[0]].on_full = "wait"
        self.num_steps = rng.choice([1, 2, 3, 3, 4, 5])
        self.is_endless = rng.random() < 0.5
        self.num_prompts, self.num_epochs = rng.randint(1, 9), rng.randint(1, 2)
        self.counts_epochs = not self.is_endless and rng.random() < 0.5
        if self.counts_epochs:
            self.num_steps = -(-self.num_draws // self.paces["a"].batch)
        self.save_every: Any = rng.choice(["never", 1, 2, 2, 3])
        self.eval_every = rng.choice([None, 1, 2, 2, 3])
        self.eval_first = rng.random() < 0.5 and self.eval_every is not None
        self.background = self.seed % 3 > 0
        lost = rng.choice([0.0, 0.0, 0.15])
        self.lost = {
            (name, o) for name in self.paces for o in range(200) if rng.random() < lost
        }  # fmt: skip

    def _pace(self, rng: random.Random, *, is_leader: bool) -> Pace:
        max_staleness = 0 if self.is_deterministic else rng.choice([0, 0, 1, 2, 3])
        on_full = "wait"
        if not is_leader and not self.is_deterministic and rng.random() < 0.25:
            on_full = "drop_oldest"
        return Pace(
            batch=rng.randint(1, 4),
            max_staleness=max_staleness,
            publish_every=rng.randint(1, max_staleness + 1),
            on_full=on_full,
            max_lead=None if is_leader else rng.choice([None, None, 1, 2]),
            is_shared=rng.random() < 0.75,
        )

    @property
    def num_draws(self) -> int:
        return self.num_prompts * self.num_epochs

    @property
    def shared(self) -> list[str]:
        return [name for name, pace in self.paces.items() if pace.is_shared]

    @property
    def feeds(self) -> dict[str, list[str]]:
        """Feed -> its policies, the leader first."""
        found = {"shared": self.shared} if self.shared else {}
        return found | {name: [name] for name, p in self.paces.items() if not p.is_shared}

    def leads(self) -> dict[str, int]:
        """As `build.joint` has them."""
        leads = {name: pace.max_lead for name, pace in self.paces.items()}
        if self.is_deterministic:
            shared = self.shared if "a" in self.shared else []
            leads |= {n: leads[n] or 0 for n in self.paces if n != "a" and n not in shared}
        return {name: limit for name, limit in leads.items() if limit is not None}
