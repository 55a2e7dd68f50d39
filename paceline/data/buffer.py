"""Finished groups between sampling and training, for one policy, with slots that bound staleness.

    admit(draw) --running--> deliver(group) --ready--> take() --taken--> learned()
        |                        '--> drop(reason): the slot is free at once
        '--> withdraw(): cancelled, the draw goes back to the stream

With B groups a step, s = max_staleness, and p = the last step whose weights the engines serve:

    B * (steps trained) + taken + ready + running  <=  (s + p + 1) * B          at all times

A slot is taken before a group is sampled and comes back when weights are published. So the i-th
group in the order of draws is trained in step ceil(i / B) <= s + p + 1, from weights of step
s + p at most, where p is that of its admission. Nothing finished is too old to be used.

A buffer that must not hold its partners back (`drop_oldest`) takes no slots: it drops the oldest
ready groups beyond (s + 1) * B, and those that would be trained from weights more than s steps
after the ones that were served when they were admitted.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.data.group_codec import decode_group, encode_group
from paceline.data.tickets import Dropped, Event, EventKind, OnFull, Step, Taken, Ticket
from paceline.errors import CheckpointError, ResumeMismatchError
from paceline.types import Draw, Group, JsonValue

OLDEST = "oldest"
"""Reason of what a full or late `drop_oldest` buffer drops."""


class Buffer:
    """The groups of one policy between sampling and training.

    `take` gives them strictly in the order of draws (with `drop_oldest`: of those that are
    ready). All methods but `take` act at once. listeners: called after every change.
    """

    def __init__(
        self,
        policy: str,
        *,
        batch: int,
        max_staleness: int,
        on_full: OnFull = "wait",
        step: int = 0,
        record: Callable[[Event], None] | None = None,
    ) -> None:
        """
        Args:
            batch: groups of one step of the policy.
            max_staleness: steps; also how many batches may be made ahead.
            step: the last trained step, whose weights the engines serve when sampling begins.
            record: is told of everything that befalls a draw; it must not raise.
        """
        self.policy = policy
        self.batch = batch
        self.max_staleness = max_staleness
        self.on_full: OnFull = on_full
        self.trained_step = step
        self.published_step = step
        self.listeners: list[Callable[[], None]] = []
        self._record = record
        self._tickets: dict[int, Ticket] = {}
        self._order: list[int] = []
        self._awaited: set[int] = set()
        """Withdrawn draws, which the stream gives out again: later ones wait for them."""
        self._dropped: list[Dropped] = []
        self._num_stragglers = 0
        self._step: Step | None = None
        self._num_waiting = 0
        self._is_closed = False
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    # What there is

    @property
    def num_running(self) -> int:
        return len(self._tickets) - self.num_ready

    @property
    def num_ready(self) -> int:
        return sum(ticket.group is not None for ticket in self._tickets.values())

    @property
    def num_taken(self) -> int:
        return 0 if self._step is None else len(self._step.tickets)

    @property
    def num_free(self) -> int | None:
        """Groups that may be admitted now; None if any number may."""
        if self.on_full == "drop_oldest":
            return None
        capacity = (self.max_staleness + self.published_step + 1) * self.batch
        used = self.trained_step * self.batch + self.num_taken + len(self._tickets)
        return max(0, capacity - used)

    @property
    def is_starved(self) -> bool:
        """True while a `take` waits for groups that are not ready yet."""
        if self._step is not None or not self._num_waiting or self._is_closed:
            return False
        if self.on_full == "drop_oldest":
            return self.num_ready < self.batch
        head = self._order[: self.batch]
        return len(head) < self.batch or any(self._tickets[o].group is None for o in head)

    @property
    def first_epoch(self) -> int | None:
        """Epoch of the first draw that is neither taken nor dropped; None if there is none."""
        return self._tickets[self._order[0]].draw.epoch if self._order else None

    def blocking(self) -> list[int]:
        """Running draws that a `take` waits for: those among the next batch."""
        if not self._num_waiting or self.on_full == "drop_oldest":
            return []
        return [o for o in self._order[: self.batch] if self._tickets[o].group is None]

    # The feed's side

    def admit(self, draw: Draw) -> None:
        """A group starts. Raises ValueError without a free slot, or if the draw is here already."""
        if self.num_free == 0:
            raise ValueError(f"policy {self.policy!r} has no free slot for draw {draw.ordinal}")
        if draw.ordinal in self._tickets:
            raise ValueError(f"policy {self.policy!r} has draw {draw.ordinal} already")
        self._awaited.discard(draw.ordinal)
        self._add(Ticket(draw, self.published_step))
        self._tell("running", draw.ordinal, self.published_step)
        self._notify()

    def deliver(self, ordinal: int, group: Group) -> None:
        """A running group is finished and can be trained on."""
        self._running(ordinal).group = group
        self._tell("sampled", ordinal, self.trained_step)
        self._trim()
        self._notify()

    def drop(self, ordinal: int, reason: str, group: Group | None = None) -> None:
        """A running group is used up and not trained on; its slot is free."""
        self._running(ordinal)
        self._drop(ordinal, reason, group)
        self._trim()
        self._notify()

    def withdraw(self, ordinal: int) -> None:
        """A group was cancelled, and its draw goes back to the stream. Only if it runs here.

        It keeps its place: no later group is taken before it was admitted again.
        """
        ticket = self._tickets.get(ordinal)
        if ticket is None or ticket.group is not None:
            return
        self._remove(ordinal)
        self._awaited.add(ordinal)
        self._tell("withdrawn", ordinal, self.trained_step)
        self._notify()

    def note_straggler(self) -> None:
        """Count a group that kept `take` waiting for too long."""
        self._num_stragglers += 1

    def close(self) -> None:
        """No more groups come."""
        self._is_closed = True
        self._awaited.clear()
        self._notify()

    def fail(self, failure: BaseException) -> None:
        """No more groups come, for this reason; every `take` raises it."""
        self._failure = self._failure or failure
        self._notify()

    # The policy's side

    async def take(self, n: int | None = None) -> Taken:
        """Wait for the next n groups (default: a batch) and take them out.

        Gives fewer, or none, once the buffer is closed. Until `learned` is called it gives the
        same groups again, so a caller that was cancelled loses nothing. Raises what `fail` was
        given.
        """
        count = n or self.batch
        self._num_waiting += 1
        try:
            self._notify()
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._step is None:
                    self._step = self._next_step(count)
                if self._step is not None:
                    return self._step.taken
                await self._changed.wait()  # ends: by deliver, close or fail, which the feed calls
        finally:
            self._num_waiting -= 1

    def learned(self) -> None:
        """The taken groups are trained on: one more step is done."""
        if self._step is None or not self._step.tickets:
            raise RuntimeError(f"policy {self.policy!r} has learned from groups it did not take")
        self.trained_step += 1
        for ticket in self._step.tickets:
            self._tell("trained", ticket.draw.ordinal, self.trained_step)
        self._step = None
        self._trim()
        self._notify()

    def published(self, step: int) -> None:
        """The engines serve the weights of this step; its slots come back."""
        if not self.published_step <= step <= self.trained_step:
            raise ValueError(
                f"policy {self.policy!r} can not publish step {step}: step {self.published_step} "
                f"was published and step {self.trained_step} was trained last"
            )
        self.published_step = step
        self._notify()

    # Checkpoints

    def state(self, groups: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """What is ready, or taken and not learned, as JSON values; what runs is awaited again.

        The groups themselves go into `groups`, which buffers of one feed share, by ordinal.
        """
        tickets = [t for o in self._order if (t := self._tickets[o]).group is not None]
        dropped, num_stragglers = self._dropped, self._num_stragglers
        if self._step is not None:
            tickets = [*self._step.tickets, *tickets]
            dropped = [*self._step.taken.dropped, *dropped]
            num_stragglers += self._step.taken.num_stragglers
        for group in [*(t.group for t in tickets), *(d.group for d in dropped)]:
            if group is not None and str(group.draw) not in groups:
                groups[str(group.draw)] = encode_group(group)
        return {
            "step": self.trained_step,
            "awaited": sorted([*self._awaited, *self._running_ordinals()]),
            "ready": [[t.draw.ordinal, t.draw.epoch, t.admitted] for t in tickets],
            "dropped": [[d.ordinal, d.prompt, d.reason, d.group is not None] for d in dropped],
            "stragglers": num_stragglers,
        }

    def restore(
        self,
        state: Mapping[str, Any],
        groups: Mapping[str, Any],
        known: dict[str, Group],
        *,
        step: int,
    ) -> None:
        """Go to where `state` was taken, with engines that serve the weights of `step`.

        known: groups that another buffer has read from `groups`, and now this one.

        Raises:
            CheckpointError: if the state is damaged.
            ResumeMismatchError: if it is of another step, or holds more than fits.
        """

        def read(ordinal: int) -> Group:
            key = str(ordinal)
            if key not in known:
                known[key] = decode_group(groups[key], f"group {key}")
            return known[key]

        try:
            saved = int(state["step"])
            tickets = [
                Ticket(Draw(int(ordinal), int(epoch), read(ordinal).prompt), int(admitted))
                for ordinal, epoch, admitted in state["ready"]
            ]
            dropped = [
                Dropped(int(ordinal), str(prompt), str(reason), read(ordinal) if is_kept else None)
                for ordinal, prompt, reason, is_kept in state["dropped"]
            ]
            awaited = {int(ordinal) for ordinal in state["awaited"]}
            num_stragglers = int(state["stragglers"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the saved buffer of policy {self.policy!r} is damaged: {error!r}"
            ) from error
        self._check_fit(saved, step, len(tickets))
        self.trained_step = self.published_step = step
        self._tickets, self._order, self._awaited = {}, [], awaited
        for ticket in tickets:
            ticket.group = known[str(ticket.draw.ordinal)]
            self._add(ticket)
        self._dropped = sorted(dropped, key=lambda lost: lost.ordinal)
        self._num_stragglers = num_stragglers
        self._step, self._is_closed, self._failure = None, False, None
        self._trim()
        self._notify()

    def _check_fit(self, saved: int, step: int, num_ready: int) -> None:
        if saved != step:
            raise ResumeMismatchError(
                f"the saved buffer of policy {self.policy!r} is of step {saved}, "
                f"its weights are of step {step}: they are not of one checkpoint"
            )
        capacity = (self.max_staleness + 1) * self.batch
        if self.on_full == "wait" and num_ready > capacity:
            raise ResumeMismatchError(
                f"the checkpoint holds {num_ready} finished groups of policy {self.policy!r}, and "
                f"(max_staleness + 1) x prompts_per_step = {capacity} fit: resume with the former "
                "max_staleness and prompts_per_step"
            )

    # Within

    def _next_step(self, count: int) -> Step | None:
        """Take out the next groups; None if they are not ready."""
        if self.on_full == "drop_oldest":
            chosen = [o for o in self._order if self._tickets[o].group is not None][:count]
        else:
            chosen = self._order[:count]
        is_exhausted = self._is_closed and len(chosen) < count
        if len(chosen) < count and not is_exhausted:
            return None
        if self.on_full == "wait" and not self._is_in_order(chosen):
            return None
        tickets = [self._remove(ordinal) for ordinal in chosen]
        until = float("inf") if is_exhausted else chosen[-1]
        taken = Taken(
            groups=[ticket.group for ticket in tickets if ticket.group is not None],
            staleness=[self.trained_step - ticket.admitted for ticket in tickets],
            dropped=[lost for lost in self._dropped if lost.ordinal < until],
            num_stragglers=self._num_stragglers,
            num_ready=self.num_ready,
            is_exhausted=is_exhausted,
        )
        self._dropped = [lost for lost in self._dropped if not lost.ordinal < until]
        self._num_stragglers = 0
        for ordinal in chosen:
            self._tell("taken", ordinal, self.trained_step + 1)
        return Step(taken, tickets)

    def _is_in_order(self, chosen: Sequence[int]) -> bool:
        """True if all of these, and all before them, are finished."""
        if any(self._tickets[o].group is None for o in chosen):
            return False
        return not chosen or min(self._awaited, default=chosen[-1]) >= chosen[-1]

    def _trim(self) -> None:
        """Hold a `drop_oldest` buffer to its bounds."""
        if self.on_full == "wait":
            return
        bound = (self.max_staleness + 1) * self.batch
        ready = [o for o in self._order if self._tickets[o].group is not None]
        num_excess = len(ready) - bound
        for i, ordinal in enumerate(ready):
            age = self.trained_step - self._tickets[ordinal].admitted
            if i < num_excess or age > self.max_staleness:
                self._drop(ordinal, OLDEST, None)
        kept: Sequence[Dropped] = [lost for lost in self._dropped if lost.group is not None]
        for lost in kept[: max(0, len(kept) - bound)]:
            lost.group = None

    def _running_ordinals(self) -> list[int]:
        return [o for o in self._order if self._tickets[o].group is None]

    def _running(self, ordinal: int) -> Ticket:
        ticket = self._tickets.get(ordinal)
        if ticket is None or ticket.group is not None:
            raise ValueError(f"draw {ordinal} does not run for policy {self.policy!r}")
        return ticket

    def _add(self, ticket: Ticket) -> None:
        self._tickets[ticket.draw.ordinal] = ticket
        insort(self._order, ticket.draw.ordinal)

    def _remove(self, ordinal: int) -> Ticket:
        self._order.remove(ordinal)
        return self._tickets.pop(ordinal)

    def _drop(self, ordinal: int, reason: str, group: Group | None) -> None:
        lost = Dropped(ordinal, self._remove(ordinal).draw.prompt.name, reason, group)
        insort(self._dropped, lost, key=lambda lost: lost.ordinal)
        self._tell("dropped", ordinal, self.trained_step, reason)

    def _tell(self, kind: EventKind, ordinal: int, step: int, reason: str = "") -> None:
        if self._record is not None:
            self._record(Event(kind, self.policy, ordinal, step, reason))

    def _notify(self) -> None:
        """Wake everybody who waits now; whoever comes later looks for himself first."""
        self._changed.set()
        self._changed.clear()
        for listener in self.listeners:
            listener()
