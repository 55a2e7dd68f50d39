"""Samples ahead of training: fills the buffers of all policies that share one environment.

    stream --Draw--> runner.collect --> settle --Group--> buffer of each policy --> take
      ^                  | cancelled, failed                  |
      '---- give_back ---'          slots free again <--------' (learned, published)

A draw starts when every buffer that waits has a slot for it, and takes one in each. The feed owns
the tasks that it starts: however `run` ends, they are stopped, and the draws that were not
delivered are back in the stream. It never looks at a clock, but for stragglers.

wave        starts as many groups as fit and waits for all of them. What is sampled from which
            weights then depends on counts alone (with max_staleness = 0).
continuous  starts a group whenever one fits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from paceline.deadline import result_of, stop
from paceline.errors import CheckpointError, ConfigError, ResumeMismatchError
from paceline.rollout.batch import RolloutBatch
from paceline.rollout.feed_batch import batch_of
from paceline.rollout.feed_seams import (
    DrawStream,
    GroupBuffer,
    GroupRunner,
    counts_tokens,
    cuts_short,
)
from paceline.rollout.settle import Streaks, is_absent, settle
from paceline.rollout.straggler import Straggler, StragglerWatch
from paceline.types import Draw, Group, JsonValue

logger = logging.getLogger(__name__)

STATE_VERSION = 2
STOP_GRACE_S = 60.0
"""For cancelled groups to end: more than the runner gives its episodes."""
STRAGGLER = "straggler"


@dataclass(slots=True, eq=False)
class _Play:
    """Draws that are sampled together."""

    draws: Sequence[Draw]
    task: asyncio.Task[list[Group]]


class Feed:
    """Keeps buffers filled; `run` is its task, which the caller owns. Pure asyncio.

    The first buffer is that of the leader.
    """

    def __init__(
        self,
        stream: DrawStream,
        runner: GroupRunner,
        buffers: Mapping[str, GroupBuffer],
        *,
        wave: int,
        mode: Literal["wave", "continuous"],
        max_in_flight: int | None = None,
        straggler: Straggler | None = None,
    ) -> None:
        """
        Args:
            buffers: by policy; all of the policies that learn from these groups.
            wave: most groups of a wave; so many failed ones in a row end the run.
            max_in_flight: most groups at a time in continuous mode; default: as many as fit.

        Raises:
            ConfigError: if nothing bounds the feed, or a straggler can not be dealt with.
        """
        straggler = straggler or Straggler()
        self._waiters = [b for b in buffers.values() if b.on_full == "wait"]
        if not self._waiters:
            raise ConfigError(
                "every policy drops the oldest groups when it is full, so nothing bounds sampling: "
                "one of them must wait"
            )
        if straggler.after_s is not None and mode == "wave":
            raise ConfigError("stragglers are dealt with only where sampling never stops")
        if straggler.action == "truncate" and not cuts_short(runner):
            raise ConfigError("the answers of this environment can not be ended early")
        self.buffers = buffers
        self._stream = stream
        self._runner = runner
        self._wave = wave
        self._mode = mode
        self._max_in_flight = max_in_flight
        self._straggler = straggler
        self._watch = StragglerWatch(straggler.after_s)
        self._streaks = Streaks(wave, runner.config.max_refills, buffers)
        self._plays: list[_Play] = []
        self._stopping: set[asyncio.Task[list[Group]]] = set()
        self._num_holds = 0
        self._lost_tokens: dict[str, int] = {}
        self._is_exhausted = False
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        for buffer in buffers.values():
            buffer.listeners.append(self._notify)

    @property
    def in_flight(self) -> list[Draw]:
        """Draws that are being sampled, in order."""
        draws = (draw for play in self._plays for draw in play.draws)
        return sorted(draws, key=lambda draw: draw.ordinal)

    def is_starved(self, policy: str) -> bool:
        """True if the policy waits for groups, and none come before somebody else moves."""
        is_idle = not self._plays and not self._num_startable() and not self._is_exhausted
        return is_idle and self.buffers[policy].is_starved

    async def run(self) -> None:
        """Sample until the stream is exhausted, then close the buffers.

        An exception of the runner or of settling is raised, and by every `take` too. It may be
        called again after it was cancelled.
        """
        self._is_exhausted = False
        try:
            await self._produce()
        except asyncio.CancelledError:
            await self._abandon()
            raise
        except BaseException as exc:
            self._failure = exc
            await self._abandon()
            raise
        for buffer in self.buffers.values():
            buffer.close()

    async def take(self, policy: str, n: int | None = None) -> RolloutBatch:
        """Wait for the groups of a policy's next step; see `Buffer.take`."""
        taken = await self.buffers[policy].take(n)
        return batch_of(
            taken, policy, self._runner.config, batch=n or self.buffers[policy].batch,
            can_drop_oldest=self.buffers[policy].on_full == "drop_oldest",
            has_stragglers=self._straggler.after_s is not None,
            max_staleness=self.buffers[policy].max_staleness,
            lost_tokens=self._lost_tokens.pop(policy, 0),
        )  # fmt: skip

    def epoch(self, policy: str) -> int:
        """Epochs of which this policy has taken, or dropped, every draw."""
        first = self.buffers[policy].first_epoch
        return self._stream.epoch if first is None else min(first, self._stream.epoch)

    def lost_tokens(self, policy: str) -> int:
        """Tokens of a policy that were sampled before a restart for draws that begin anew."""
        return self._lost_tokens.get(policy, 0)

    def is_exhausted(self, policy: str) -> bool:
        """True if no further batch will come for this policy."""
        return self._stream.num_left == 0 and self.buffers[policy].first_epoch is None

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Start nothing, and come in when nothing is sampled any more. The caller has a deadline.

        Raises the feed's own exception if it has failed.
        """
        self._num_holds += 1
        try:
            while self._failure is None and (self._plays or self._stopping):
                await self._changed.wait()  # ends: by the caller's deadline at the latest
            if self._failure is not None:
                raise self._failure
            yield
        finally:
            self._num_holds -= 1
            self._notify()

    # Checkpoints

    def state(self) -> dict[str, JsonValue]:
        """Cursor and buffers as JSON values: what is being sampled is in it as not drawn yet."""
        groups: dict[str, JsonValue] = {}
        buffers = {name: buffer.state(groups) for name, buffer in self.buffers.items()}
        under_way = self._runner.tokens_under_way() if counts_tokens(self._runner) else {}
        return {
            "version": STATE_VERSION,
            "tokens_under_way": {name: under_way.get(name, 0) for name in self.buffers},
            "stream": self._stream.state(self.in_flight),
            "groups": groups,
            "buffers": buffers,
        }

    def restore(self, state: Mapping[str, Any], steps: Mapping[str, int]) -> None:
        """Go to where `state` was taken; steps: the step of each policy's weights.

        Raises:
            CheckpointError: if the state is of another version or damaged.
            ResumeMismatchError: if it belongs to other prompts, policies or steps.
        """
        if state.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"the state of the buffers has version {state.get('version')!r}; this Paceline "
                f"reads version {STATE_VERSION}: resume with the version that wrote it"
            )
        saved, groups = state.get("buffers"), state.get("groups")
        if not isinstance(saved, Mapping) or not isinstance(groups, Mapping):
            raise CheckpointError("the state of the buffers is damaged: it holds no buffers")
        if saved.keys() != self.buffers.keys():
            raise ResumeMismatchError(
                f"the checkpoint has buffers of {', '.join(sorted(saved)) or 'nobody'}, the run "
                f"has {', '.join(sorted(self.buffers))}"
            )
        if not isinstance(state.get("stream"), Mapping):
            raise CheckpointError("the state of the buffers is damaged: it holds no data cursor")
        self._stream.restore(state["stream"])
        self._lost_tokens = dict(state.get("tokens_under_way", {}))
        known: dict[str, Group] = {}
        for name, buffer in self.buffers.items():
            buffer.restore(saved[name], groups, known, step=steps[name])

    # Producing

    async def _produce(self) -> None:
        while True:
            self._settle_done()
            self._start_what_fits()
            if self._is_exhausted and not self._plays:
                return
            self._deal_with_stragglers()
            if self._num_startable():
                continue
            # A change that comes before the wait was seen above: nothing in between gives way.
            try:
                async with asyncio.timeout_at(self._watch.next_at()):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _num_startable(self) -> int:
        """How many draws to start now."""
        if self._num_holds or self._is_exhausted:
            return 0
        num_free = min(buffer.num_free or 0 for buffer in self._waiters)
        if self._mode == "wave":
            return 0 if self._plays else min(num_free, self._wave)
        if self._max_in_flight is None:
            return num_free
        return max(0, min(num_free, self._max_in_flight - len(self._plays)))

    def _start_what_fits(self) -> None:
        num_wanted = self._num_startable()
        draws = self._stream.take(num_wanted)
        self._is_exhausted |= len(draws) < num_wanted or self._stream.num_left == 0
        for started in [draws] if self._mode == "wave" else [[draw] for draw in draws]:
            if started:
                self._start(started)

    def _start(self, draws: Sequence[Draw]) -> None:
        task = asyncio.create_task(self._collect(draws))
        task.add_done_callback(lambda _: self._notify())
        self._plays.append(_Play(draws, task))
        for draw in draws:
            for buffer in self.buffers.values():
                buffer.admit(draw)

    async def _collect(self, draws: Sequence[Draw]) -> list[Group]:
        return await self._runner.collect(draws, step=self._step)

    @property
    def _step(self) -> int:
        """For messages: the step that the leader trains next."""
        return next(iter(self.buffers.values())).trained_step + 1

    def _settle_done(self) -> None:
        for play in [play for play in self._plays if play.task.done()]:
            self._settle(play, result_of(play.task))

    def _settle(self, play: _Play, groups: Sequence[Group]) -> None:
        """Hand groups over in the order of draws. What raises does so before anything is."""
        settled = settle(
            groups, self.buffers, config=self._runner.config, reward=self._runner.reward,
            step=self._step,
        )  # fmt: skip
        for group, reasons in zip(groups, settled, strict=True):
            for policy, reason in reasons.items():
                if reason is None and is_absent(group, policy):
                    reasons[policy] = "absent"
            self._streaks.add(group, reasons, self._step)
        self._plays.remove(play)
        for draw, group, reasons in zip(play.draws, groups, settled, strict=True):
            for policy, reason in reasons.items():
                if reason is None:
                    self.buffers[policy].deliver(draw.ordinal, group)
                else:
                    self.buffers[policy].drop(draw.ordinal, reason, group)

    async def _abandon(self) -> None:
        """Give back what was not delivered, tell who waits, and end every task."""
        draws = self.in_flight
        for play in self._plays:
            self._stop_aside(play.task)
        self._plays.clear()
        for buffer in self.buffers.values():
            for draw in draws:
                buffer.withdraw(draw.ordinal)
        self._stream.give_back(draws)
        if self._failure is not None:
            for buffer in self.buffers.values():
                buffer.fail(self._failure)
        self._notify()
        await stop(*self._stopping, grace_s=STOP_GRACE_S)

    # Stragglers

    def _deal_with_stragglers(self) -> None:
        blocked: dict[int, list[GroupBuffer]] = {}
        for buffer in self._waiters:
            for ordinal in buffer.blocking():
                blocked.setdefault(ordinal, []).append(buffer)
        for ordinal in self._watch.late(blocked, asyncio.get_running_loop().time()):
            for buffer in blocked[ordinal]:
                buffer.note_straggler()
            self._deal_with_straggler(self._play_of(ordinal))

    def _deal_with_straggler(self, play: _Play) -> None:
        (draw,) = play.draws
        logger.warning(
            "a step has waited %g s for prompt %r (draw %d): %s",
            self._straggler.after_s, draw.prompt.id, draw.ordinal, self._straggler.action,
        )  # fmt: skip
        if self._straggler.action == "truncate" and cuts_short(self._runner):
            self._runner.cut_short(draw)
        elif self._straggler.action == "drop_group" and not play.task.done():
            self._plays.remove(play)
            self._stop_aside(play.task)
            for buffer in self.buffers.values():
                buffer.drop(draw.ordinal, STRAGGLER)
            self._streaks.add(None, dict.fromkeys(self.buffers, STRAGGLER), self._step)

    def _stop_aside(self, task: asyncio.Task[list[Group]]) -> None:
        """Cancel a task whose result nobody wants; it is ours until it has ended."""
        self._stopping.add(task)
        task.cancel()

        def ended(task: asyncio.Task[list[Group]]) -> None:
            self._stopping.discard(task)
            if not task.cancelled():
                task.exception()  # seen: asyncio would otherwise report it as never retrieved
            self._notify()

        task.add_done_callback(ended)

    def _play_of(self, ordinal: int) -> _Play:
        return next(p for p in self._plays if any(d.ordinal == ordinal for d in p.draws))

    def _notify(self) -> None:
        """Wake everybody who waits now; whoever comes later looks for himself first."""
        self._changed.set()
        self._changed.clear()
