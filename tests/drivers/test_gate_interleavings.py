"""The gate under random interleavings, failures and cancellations, by seed, in virtual time."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from drivers.virtual_time import run_virtual

from paceline.drivers.gate import Gate
from paceline.errors import GateError

LONGEST_WORK_S = 3.0
LONGEST_HOLD_S = 2.0
SECONDS = (0.0, 0.0, 0.5, 1.0, 2.0)
NUM_SEEDS = 4000


@dataclass
class World:
    """Members and leaders that do random things, and what must hold after every callback."""

    seed: int
    rng: random.Random = field(init=False)
    working: set[str] = field(default_factory=set)
    """Members that change weights just now."""
    holders: list[str] = field(default_factory=list)
    num_held: int = 0
    num_turns: dict[str, int] = field(default_factory=dict)
    gate: Gate = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def check(self) -> None:
        assert len(self.holders) <= 1, f"held by {self.holders}"
        assert not (self.holders and self.working), f"{self.working} work while the gate is held"

    def seconds(self) -> float:
        return self.rng.choice(SECONDS)

    async def member(self, name: str) -> None:
        """Like a follower: waits for data in a region, then works; sometimes ends in an error."""
        for _ in range(self.rng.randrange(1, 12)):
            async with self.gate.safe_region(name):
                await asyncio.sleep(self.seconds())
                if self.rng.random() < 0.05:
                    raise ValueError(f"no data for {name}")
            await self.work(name)
            if self.rng.random() < 0.03:
                raise ValueError(f"{name} could not learn")
            self.num_turns[name] = self.num_turns.get(name, 0) + 1

    async def work(self, name: str) -> None:
        self.working.add(name)
        try:
            await asyncio.sleep(min(self.seconds(), LONGEST_WORK_S))
        finally:
            self.working.discard(name)

    async def leader(self, name: str, by: str | None) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(self.rng.randrange(1, 8)):
            await (asyncio.sleep(self.seconds()) if by is None else self.work(by))
            asked = loop.time()
            limit_s = self.rng.choice([None, 0.0, 0.7])
            # A member that could not rest with the others must not go on as if it had.
            with suppress(ZeroDivisionError if by else GateError, ZeroDivisionError):
                async with self.gate.exclusive(by=by, limit_s=limit_s):
                    assert loop.time() - asked <= self.longest_wait_s()
                    await self.hold(name)

    async def hold(self, name: str) -> None:
        self.holders.append(name)
        self.num_held += 1
        try:
            await asyncio.sleep(min(self.seconds(), LONGEST_HOLD_S))
            if self.rng.random() < 0.1:
                raise ZeroDivisionError
        finally:
            self.holders.remove(name)

    def longest_wait_s(self) -> float:
        """Two leaders; each request waits for one stretch of work, and perhaps one of the other."""
        return 2 * LONGEST_WORK_S + LONGEST_HOLD_S

    async def live(self) -> None:
        clock = asyncio.get_running_loop().time
        names = [f"m{i}" for i in range(self.rng.randrange(5))]
        is_member = self.rng.random() < 0.5
        deadline_s = self.rng.choice([None, None, 1.5])
        members = [*names, "leader"] if is_member else names
        self.gate = Gate(members, deadline_s=deadline_s, clock=clock)
        works = {name: self.member(name) for name in names}
        works["leader"] = self.leader("leader", "leader" if is_member else None)
        if self.rng.random() < 0.5:
            works["saver"] = self.leader("saver", None)
        tasks = [asyncio.create_task(work, name=name) for name, work in works.items()]
        for task in tasks:
            if task.get_name() in members:
                task.add_done_callback(lambda task: self.gate.leave(task.get_name()))
        for _ in range(self.rng.randrange(3)):
            await asyncio.sleep(self.seconds())
            self.rng.choice(tasks).cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            is_fine = outcome is None or isinstance(
                outcome, ValueError | GateError | asyncio.CancelledError
            )
            assert is_fine, repr(outcome)
        await self.check_clean()

    async def check_clean(self) -> None:
        """Everybody has ended: nothing of the past keeps the gate closed."""
        assert not self.gate.is_held
        async with self.gate.exclusive():
            pass


@pytest.mark.parametrize("part", range(4))
def test_thousands_of_random_interleavings(part: int) -> None:
    num_held = num_turns = 0
    for seed in range(part, NUM_SEEDS, 4):
        world = World(seed)
        run_virtual(world.live, seed=seed, check=world.check)
        num_held += world.num_held
        num_turns += sum(world.num_turns.values())
    assert num_held > NUM_SEEDS / 4
    assert num_turns > NUM_SEEDS / 4


def test_the_same_seed_gives_the_same_history() -> None:
    def history(seed: int) -> tuple[int, dict[str, int], float]:
        world = World(seed)
        run_virtual(world.live, seed=seed)
        return world.num_held, world.num_turns, world.gate.waited_s

    assert [history(seed) for seed in range(50)] == [history(seed) for seed in range(50)]
