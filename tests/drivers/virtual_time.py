"""An event loop without real time or randomness of its own, for tests of code that waits.

Its clock jumps to the next timer when nothing is ready. If there is no timer either, everybody
waits for somebody: that is a deadlock, and an error. By seed, the callbacks that are ready at one
moment run in a random order; so tasks interleave in ways that a real loop shows once a year.

For coroutines, futures and timers only: threads, sockets and processes do not exist here.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

MAX_CALLBACKS = 1_000_000
NUM_SHOWN = 40
"""Callbacks of the schedule that a failure shows, the last ones."""


class DeadlockError(Exception):
    """Nothing is ready, and no timer will change that."""


class LivelockError(Exception):
    """It goes on for ever."""


class VirtualLoop(asyncio.base_events.BaseEventLoop):
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _stopping: bool
    _timer_cancelled_count: int

    def __init__(
        self,
        seed: int | None,
        check: Callable[[], None] | None = None,
        max_callbacks: int = MAX_CALLBACKS,
    ) -> None:
        """seed: of the order of callbacks; None: first come, first served, as in a real loop.
        check: called after every callback; what it raises ends the run.
        """
        super().__init__()
        self._now = 0.0
        self._random = None if seed is None else random.Random(seed)
        self._check = check
        self._max_callbacks = max_callbacks
        self.num_callbacks = 0
        self.schedule: deque[tuple[float, object]] = deque(maxlen=NUM_SHOWN)

    def time(self) -> float:
        return self._now

    def _write_to_self(self) -> None:
        """Wakes a loop that sleeps; this one never does."""

    def _run_once(self) -> None:
        self._move_clock()
        if self._random is not None and len(self._ready) > 1:
            self._random.shuffle(self._ready)
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if handle.cancelled():
                continue
            self.num_callbacks += 1
            if self.num_callbacks > self._max_callbacks:
                raise LivelockError(f"more than {self._max_callbacks} callbacks")
            self.schedule.append((self._now, handle._callback))  # type: ignore[attr-defined]
            handle._run()
            if self._check is not None:
                self._check()

    def _move_clock(self) -> None:
        """To the first timer, if nothing is ready; timers whose time has come become ready."""
        self._drop_cancelled()
        if not self._ready and not self._stopping:
            if not self._scheduled:
                raise DeadlockError(self._stuck())
            self._now = max(self._now, self._scheduled[0].when())
        while self._scheduled and self._scheduled[0].when() <= self._now:
            self._ready.append(self._pop())
            self._drop_cancelled()

    def _drop_cancelled(self) -> None:
        while self._scheduled and self._scheduled[0].cancelled():
            self._timer_cancelled_count -= 1
            self._pop()

    def _pop(self) -> asyncio.TimerHandle:
        timer = heapq.heappop(self._scheduled)
        timer._scheduled = False  # type: ignore[attr-defined]
        return timer

    def _stuck(self) -> str:
        lines = ["nothing is ready and there is no timer; these tasks wait:"]
        for task in sorted(asyncio.all_tasks(self), key=lambda task: task.get_name()):
            frames = task.get_stack()
            at = f"{frames[-1].f_code.co_filename}:{frames[-1].f_lineno}" if frames else "its start"
            lines.append(f"  {task.get_name()} at {at}")
        return "\n".join(lines)

    def story(self) -> str:
        """The last callbacks, for people."""
        lines = []
        for when, callback in self.schedule:
            owner = getattr(callback, "__self__", None)
            name = owner.get_name() if isinstance(owner, asyncio.Task) else repr(callback)
            lines.append(f"  {when:10.4f} {name}")
        return "\n".join(lines)


def run_virtual(
    make: Callable[[], Coroutine[Any, Any, T]],
    *,
    seed: int = 0,
    shuffle: bool = True,
    check: Callable[[], None] | None = None,
    max_callbacks: int = MAX_CALLBACKS,
) -> T:
    """`asyncio.run` in virtual time; an error has the seed and the end of the schedule as a note.

    check: called after every callback, to hold an invariant at every moment. max_callbacks: more
    than these are taken for work that never ends.
    """
    loop = VirtualLoop(seed if shuffle else None, check, max_callbacks)
    try:
        return loop.run_until_complete(make())
    except BaseException as error:
        order = f"seed {seed}" if shuffle else "no shuffling"
        error.add_note(
            f"virtual time: {order}, at {loop.time():.4f} s, after {loop.num_callbacks} callbacks; "
            f"the last ones:\n{loop.story()}"
        )
        raise
    finally:
        loop._check = None
        _end(loop)


def _end(loop: VirtualLoop) -> None:
    """Cancel what is left. A task that waits on regardless is left behind."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    try:
        if tasks:
            loop.num_callbacks = 0
            loop.run_until_complete(asyncio.wait(tasks, timeout=1e6))
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()
            elif not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
