"""The weight check: does an engine hold what its trainer sent?

    reset (if asked for) -> receive -> compare: bit for bit by checksums, or within a tolerance

Checksums are compared first; only where they differ, and there is a tolerance, are numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from paceline.errors import WeightError
from paceline.weights.base import Receiver, WeightPlan
from paceline.weights.settings import EXACT, WeightCheckConfig
from paceline.weights.tensors import checksums, relative_error

if TYPE_CHECKING:
    from torch import Tensor

MOST_NAMED = 5
TOGETHER = 64
"""Tensors whose numbers are asked for at one time."""


@runtime_checkable
class Checkable(Protocol):
    """An engine that can tell what it holds."""

    async def checksums(self) -> Mapping[str, str]:
        """Name of each tensor that it serves -> hash of its bits, type and shape; see
        `weights.tensors.checksums`."""

    async def numbers(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Copies of some of them, on the host."""


@runtime_checkable
class SelfChecking(Protocol):
    """An engine that holds weights in a form of its own, and compares them itself."""

    async def holds(self, plan: WeightPlan, check: WeightCheckConfig = EXACT) -> list[str]:
        """In what it differs from what the sender has, in words; empty if it holds just that."""


@runtime_checkable
class Resettable(Protocol):
    """An engine whose weights can be made worthless until new ones come."""

    async def reset(self, plan: WeightPlan, check: WeightCheckConfig) -> None:
        """Fill all tensors with other numbers, but for those that the check skips. The engine is
        paused, and takes the plan's weights next."""


async def reset_weights(receiver: Receiver, plan: WeightPlan, check: WeightCheckConfig) -> None:
    """Raise WeightError if the engine can not do it."""
    if not isinstance(receiver, Resettable):
        raise WeightError(
            f"policy {plan.policy!r}: the weights of this engine can not be reset; set "
            "weight_check.reset = false"
        )
    await receiver.reset(plan, check)


async def check_weights(
    receiver: Receiver, plan: WeightPlan, check: WeightCheckConfig = EXACT
) -> None:
    """Raise WeightError with the tensors that differ from the sender's, or that are absent.

    The plan is one as `Trainer.send` returned it, with the sender's tensors or its source.
    """
    what = f"policy {plan.policy!r}, weight check of version {plan.version}"
    if isinstance(receiver, SelfChecking):
        told = "; ".join(await receiver.holds(plan, check))
    elif isinstance(receiver, Checkable):
        told = await _differences(what, plan, receiver, check)
    else:
        raise WeightError(f"{what}: the engine can not tell what it holds; set weight_check.when "
                          '= "never"')  # fmt: skip
    if told:
        raise WeightError(f"{what}: the engine does not hold what the trainer sent: {told}")


def covered(sent: Iterable[str], check: WeightCheckConfig) -> list[str]:
    """The names that are compared. Raises WeightError if a pattern is of no use."""
    names = list(sent)
    for pattern in check.only:
        if not any(WeightCheckConfig(only=(pattern,)).covers(name) for name in names):
            raise WeightError(
                f"weight_check.only: {pattern!r} names none of the {len(names)} tensors that were "
                f"sent, such as {', '.join(names[:3])}"
            )
    found = [name for name in names if check.covers(name)]
    if names and not found:
        raise WeightError("weight_check.only and weight_check.skip leave no tensor to compare")
    return found


async def sent_checksums(what: str, plan: WeightPlan) -> Mapping[str, str]:
    """Name -> hash of what the sender has."""
    if plan.tensors is not None:
        return await asyncio.to_thread(checksums, plan.tensors)
    if plan.source is not None:
        return await plan.source.checksums()
    raise WeightError(f"{what}: the plan carries no tensors to compare with")


async def sent_numbers(plan: WeightPlan, names: Sequence[str]) -> Mapping[str, Tensor]:
    """Some of the sender's tensors, in the type in which they are sent."""
    if plan.tensors is not None:
        return {name: plan.tensors[name] for name in names}
    assert plan.source is not None  # its checksums have come
    return await plan.source.numbers(names)


async def _differences(
    what: str, plan: WeightPlan, receiver: Checkable, check: WeightCheckConfig
) -> str:
    """In words; empty if there are none."""
    sent = await sent_checksums(what, plan)
    held = await receiver.checksums()
    names = covered(sent, check)
    differ = [name for name in names if name in held and held[name] != sent[name]]
    if check.tolerance and differ:
        differ = await _beyond(plan, receiver, differ, check.tolerance)
    found = {
        "differ": differ,
        "are missing": [name for name in names if name not in held],
        "are not of the trainer": [n for n in held if n not in sent and check.covers(n)],
    }
    return "; ".join(
        f"{len(wrong)} of {len(names)} tensors {verb}: {', '.join(wrong[:MOST_NAMED])}"
        for verb, wrong in found.items()
        if wrong
    )


async def _beyond(
    plan: WeightPlan, receiver: Checkable, names: list[str], tolerance: float
) -> list[str]:
    """Those of the tensors that are further off, each with its error."""
    wrong: list[str] = []
    for first in range(0, len(names), TOGETHER):
        some = names[first : first + TOGETHER]
        sent, held = await sent_numbers(plan, some), await receiver.numbers(some)
        for name in some:
            error = await asyncio.to_thread(relative_error, held[name], sent[name])
            if not error <= tolerance:
                wrong.append(f"{name} (relative error {error:.2g})")
    return wrong
