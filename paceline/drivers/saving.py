"""The one save that may go on in the background while the run does.

    steps.save     copies -> begin ------- writes, commit, acknowledge ------.
    the run                  learn, publish, collect, finish_step: check ... settle: next save,
                                                                     eval results, end

A driver runs inside `async with`: however it ends, the save has ended too. One that was begun is
completed, also after an error or Ctrl-C: its copies were whole, and nobody else can make them
again. Who cancels once more cuts it off, and its folder goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any

from paceline.trainers.background import in_thread

Call = Callable[[Callable[[], object]], Coroutine[Any, Any, object]]


async def _in_thread(work: Callable[[], object]) -> object:
    return await in_thread("checkpoint", work)


class Saves:
    """At most one save in the background. Its error is raised to who asks next, or waits for it."""

    def __init__(self, *, in_background: bool = False, call: Call = _in_thread) -> None:
        """call: runs what blocks, such as a commit, without blocking the event loop."""
        self.in_background = in_background
        self._call = call
        self._task: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        return self._task is None or self._task.done()

    async def call(self, work: Callable[[], object]) -> None:
        """Run what blocks: beside the event loop, if saves go on in the background at all."""
        if self.in_background:
            await self._call(work)
        else:
            work()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Let it go on by itself. What was begun before must be settled."""
        assert self._task is None, "settle what was begun before"
        self._task = asyncio.create_task(work, name="a save in the background")

    def check(self) -> None:
        """Raise the error of a save that has failed meanwhile."""
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()

    async def settle(self) -> None:
        """Wait for the save under way, if there is one, and raise its error."""
        if (task := self._task) is None:
            return
        await asyncio.wait([task])  # ends: with the disk
        if self._task is task:
            self._task = None
        task.result()

    async def __aenter__(self) -> Saves:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.settle()
        except asyncio.CancelledError:
            await self._cut_off()
            raise
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"also, the save in the background failed: {failure}")

    async def _cut_off(self) -> None:
        if (task := self._task) is None:
            return
        self._task = None
        task.cancel()
        await asyncio.wait([task])  # ends: when the file being written is
        if not task.cancelled():
            task.exception()  # seen: asyncio would otherwise report it as never retrieved
