"""A publish: one transaction over all receivers of a policy.

    pause all -> send -> (reset all) -> receive on all -> verify -> commit -> resume all

Until `send` has returned, every receiver holds the former weights, so a failure resumes them all.
From then on a receiver may hold anything: on a failure none is resumed, since it would serve
weights that no version names. They stay paused until a later publish reaches all of them, or
until their owner closes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from paceline.errors import WeightError
from paceline.weights.base import PauseMode, Receiver, WeightPlan


class Sender(Protocol):
    """The part of a trainer that a publish talks to."""

    async def send(self, plan: WeightPlan) -> WeightPlan:
        """Hand the weights over along the plan; returns it with what receivers need."""


Step = Callable[[Receiver, WeightPlan], Awaitable[None]]
"""Does something with a receiver of the plan, or raises."""


async def publish(
    sender: Sender,
    receivers: Mapping[str, Receiver],
    plan: WeightPlan,
    *,
    pause: PauseMode = "finish",
    reset: Step | None = None,
    verify: Step | None = None,
    commit: Callable[[WeightPlan], None] | None = None,
    deadline_s: float = 600.0,
) -> WeightPlan:
    """Bring the sender's weights to every receiver; returns the plan as it was sent.

    receivers: by the names that an error should use. reset: makes a receiver's former weights
    worthless, before it gets the plan's. verify: raises if it does not hold these then. commit:
    called once, when all have acknowledged and before any is resumed: the place to raise the
    version. deadline_s: for each of the phases. Raises WeightError that names the phase and the
    receivers that failed.
    """
    what = f"policy {plan.policy!r}, publish of version {plan.version}"
    holds_former = True
    try:
        await _on_all(f"{what}: pause", receivers, lambda r: r.pause(pause), deadline_s)
        sent = await _send(what, sender, plan, deadline_s)
        holds_former = False
        if reset is not None:
            await _on_all(f"{what}: reset", receivers, lambda r: reset(r, sent), deadline_s)
        await _on_all(f"{what}: receive", receivers, lambda r: r.receive(sent), deadline_s)
        if verify is not None:
            await _on_all(f"{what}: verify", receivers, lambda r: verify(r, sent), deadline_s)
    except BaseException as error:
        if holds_former:
            await _resume_after(error, what, receivers, deadline_s)
        elif isinstance(error, WeightError):
            error.add_note("No engine serves the new version; all of them stay paused.")
        raise
    if commit is not None:
        commit(sent)
    await _on_all(f"{what}: resume", receivers, lambda r: r.resume(), deadline_s)
    return sent


async def _on_all(
    phase: str,
    receivers: Mapping[str, Receiver],
    call: Callable[[Receiver], Awaitable[None]],
    deadline_s: float,
) -> None:
    """Call all of them at once and let every call settle before an error is raised."""

    async def bounded(receiver: Receiver) -> None:
        async with asyncio.timeout(deadline_s):
            await call(receiver)

    # ends: each call by `deadline_s`
    results = await asyncio.gather(
        *(bounded(receiver) for receiver in receivers.values()), return_exceptions=True
    )
    failed = {n: r for n, r in zip(receivers, results, strict=True) if r is not None}
    if not failed:
        return
    causes = "; ".join(f"{name!r}: {_reason(e, deadline_s)}" for name, e in failed.items())
    raise WeightError(
        f"{phase} failed on {len(failed)} of {len(receivers)} engines: {causes}"
    ) from next(iter(failed.values()))


async def _send(what: str, sender: Sender, plan: WeightPlan, deadline_s: float) -> WeightPlan:
    try:
        async with asyncio.timeout(deadline_s):
            return await sender.send(plan)
    except Exception as error:
        raise WeightError(
            f"{what}: the trainer could not send: {_reason(error, deadline_s)}"
        ) from error


async def _resume_after(
    error: BaseException, what: str, receivers: Mapping[str, Receiver], deadline_s: float
) -> None:
    try:
        await _on_all(f"{what}: resume", receivers, lambda r: r.resume(), deadline_s)
    except WeightError as second:
        error.add_note(str(second))


def _reason(error: BaseException, deadline_s: float) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return f"no answer within {deadline_s:g} s"
    return f"{type(error).__name__}: {error}"
