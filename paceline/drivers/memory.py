"""Who holds the device when engine and trainer share it: two orders, as values.

    order     before learning                        after learning            after the publish
    none      -                                      -                         -
    host      engine sleeps; trainer to device       trainer to host;          caches wake
                                                     engine weights wake
    device    caches sleep; trainer to device;       engine weights wake;      caches wake
              engine weights sleep                   trainer to host

"Trainer" is all that trains: a policy with a critic brings one of the two at a time.

With `host` the host holds trainer and engine weights together for a moment and the device never
does; with `device` it is the other way round, for hosts whose memory can not hold both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from pydantic import Field

from paceline.engines.base import Engine, Part
from paceline.trainers.base import Place
from paceline.types import Config

CACHES: frozenset[Part] = frozenset({"kv_cache", "graphs"})
WEIGHTS: frozenset[Part] = frozenset({"weights"})


class MemoryConfig(Config):
    """`[memory]`: what moves when engine and trainer share a device."""

    order: Literal["none", "host", "device"] = "none"
    """`none`: both stay. `host`: the engine leaves the device before the trainer comes; the host
    peaks. `device`: they overlap on the device; the host never holds both copies."""
    engine_parts: Annotated[tuple[Part, ...], Field(strict=False)] = (
        "kv_cache",
        "weights",
        "graphs",
    )
    """Which parts of the engine make room while the trainer learns. Leave `weights` out when the
    engine shares the trainer's parameters."""


class Movable(Protocol):
    """A trainer, or a policy that moves its own."""

    async def place(self, where: Place) -> None: ...


class MemoryPlan(Protocol):
    """The three moments of a step at which memory changes hands."""

    async def before_learn(self) -> None: ...

    async def after_learn(self) -> None: ...

    async def after_publish(self) -> None: ...


class KeepBoth:
    """Nothing moves."""

    async def before_learn(self) -> None: ...

    async def after_learn(self) -> None: ...

    async def after_publish(self) -> None: ...


@dataclass(frozen=True, slots=True)
class HostPeak:
    """The engine leaves the device before the trainer comes."""

    engine: Engine
    trainer: Movable
    parts: frozenset[Part]

    async def before_learn(self) -> None:
        await self.engine.sleep(self.parts)
        await self.trainer.place("device")

    async def after_learn(self) -> None:
        await self.trainer.place("host")
        await self.engine.wake(self.parts & WEIGHTS)

    async def after_publish(self) -> None:
        await self.engine.wake(self.parts & CACHES)


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """Engine weights and trainer overlap on the device, never on the host."""

    engine: Engine
    trainer: Movable
    parts: frozenset[Part]

    async def before_learn(self) -> None:
        await self.engine.sleep(self.parts & CACHES)
        await self.trainer.place("device")
        await self.engine.sleep(self.parts & WEIGHTS)

    async def after_learn(self) -> None:
        await self.engine.wake(self.parts & WEIGHTS)
        await self.trainer.place("host")

    async def after_publish(self) -> None:
        await self.engine.wake(self.parts & CACHES)


def make_memory_plan(config: MemoryConfig, engine: Engine, trainer: Movable) -> MemoryPlan:
    """The plan that `[memory]` names."""
    parts = frozenset(config.engine_parts)
    match config.order:
        case "none":
            return KeepBoth()
        case "host":
            return HostPeak(engine, trainer, parts)
        case "device":
            return DevicePeak(engine, trainer, parts)
