"""The weight check: does an engine hold what its trainer sent, bit for bit?"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Literal, Protocol, runtime_checkable

from paceline.errors import WeightError
from paceline.weights.base import Receiver, WeightPlan
from paceline.weights.tensors import checksums

WeightCheck = Literal["never", "first", "always"]
MOST_NAMED = 5


@runtime_checkable
class Checkable(Protocol):
    """An engine that can tell what it holds."""

    async def checksums(self) -> Mapping[str, str]:
        """Name of each tensor that it serves -> hash of its bits, type and shape; see
        `weights.tensors.checksums`."""


@runtime_checkable
class SelfChecking(Protocol):
    """An engine that holds weights in a form of its own, and compares them itself."""

    async def holds(self, plan: WeightPlan) -> list[str]:
        """In what it differs from what the sender has, in words; empty if it holds just that."""


async def check_weights(receiver: Receiver, plan: WeightPlan) -> None:
    """Raise WeightError with the tensors that differ from the sender's, or that are absent.

    The plan is one as `Trainer.send` returned it, with the sender's tensors or its source.
    """
    what = f"policy {plan.policy!r}, weight check of version {plan.version}"
    if isinstance(receiver, SelfChecking):
        told = "; ".join(await receiver.holds(plan))
    elif isinstance(receiver, Checkable):
        told = _differences(await _sent(what, plan), await receiver.checksums())
    else:
        raise WeightError(f"{what}: the engine can not tell what it holds; set run.check_weights "
                          '= "never"')  # fmt: skip
    if told:
        raise WeightError(f"{what}: the engine does not hold what the trainer sent: {told}")


async def _sent(what: str, plan: WeightPlan) -> Mapping[str, str]:
    if plan.tensors is not None:
        return await asyncio.to_thread(checksums, plan.tensors)
    if plan.source is not None:
        return await plan.source.checksums()
    raise WeightError(f"{what}: the plan carries no tensors to compare with")


def _differences(sent: Mapping[str, str], held: Mapping[str, str]) -> str:
    """In words; empty if there are none."""
    found = {
        "differ": [name for name in sent if name in held and held[name] != sent[name]],
        "are missing": [name for name in sent if name not in held],
        "are not of the trainer": [name for name in held if name not in sent],
    }
    return "; ".join(
        f"{len(names)} of {len(sent)} tensors {verb}: {', '.join(names[:MOST_NAMED])}"
        for verb, names in found.items()
        if names
    )
