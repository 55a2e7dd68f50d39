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


async def check_weights(receiver: Receiver, plan: WeightPlan) -> None:
    """Raise WeightError with the tensors that differ from the sender's, or that are absent.

    The plan is one as `Trainer.send` returned it, with the sender's tensors.
    """
    what = f"policy {plan.policy!r}, weight check of version {plan.version}"
    if not isinstance(receiver, Checkable):
        raise WeightError(f"{what}: the engine can not tell what it holds; set run.check_weights "
                          '= "never"')  # fmt: skip
    if plan.tensors is None:
        raise WeightError(f"{what}: the plan carries no tensors to compare with")
    sent = await asyncio.to_thread(checksums, plan.tensors)
    held = await receiver.checksums()
    missing = [name for name in sent if name not in held]
    extra = [name for name in held if name not in sent]
    different = [name for name in sent if name in held and held[name] != sent[name]]
    if missing or extra or different:
        found = {"differ": different, "are missing": missing, "are not of the trainer": extra}
        told = "; ".join(
            f"{len(names)} of {len(sent)} tensors {verb}: {', '.join(names[:MOST_NAMED])}"
            for verb, names in found.items()
            if names
        )
        raise WeightError(f"{what}: the engine does not hold what the trainer sent: {told}")
