"""The background task of the embedded engine: it couples callers on the event loop with the batch.

    answer --Generation--> WaitingQueue --Job--> Batch.run (worker thread) --ended--> futures

The event loop owns what waits, the futures and the pause; the worker thread owns the model, the
cache and the running batch, and is the only place where torch works. One task repeats: let
arrivals settle, hand over a job, deliver what ended. A job ends when a sequence ends or when the
loop has something to say (an arrival with a free slot, a pause, a cancellation).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from paceline.engines.base import Completion
from paceline.engines.embedded_batch import Batch, Job
from paceline.engines.embedded_queue import Generation, WaitingQueue
from paceline.engines.embedded_sampler import IntArray
from paceline.engines.turns import Turns
from paceline.errors import EngineError
from paceline.weights.base import PauseMode

T = TypeVar("T")

SETTLE_TURNS = 8
"""Turns of the event loop without a new request after which a wave counts as complete."""
MAX_SETTLE_TURNS = 1000
"""A source that never stops submitting may not hold up those that wait."""

_ABORT_CAUSE = "the engine was paused in mode abort"


@dataclass(slots=True, eq=False)
class _Score:
    tokens: IntArray
    temperature: float
    future: asyncio.Future[list[float]]


class Serving:
    """Answers and scores, first come first served, and the pauses between them."""

    def __init__(
        self, batch: Batch, *, max_prefill_tokens: int, name: str, turns: Turns | None = None
    ) -> None:
        self._turns = turns
        self._place = 0 if turns is None else turns.add_engine()
        self.waiting = WaitingQueue()
        self._batch = batch
        self._max_prefill_tokens = max_prefill_tokens
        self._name = name
        self._open: set[Generation] = set()
        """All that wait, run, or ended and were not delivered."""
        self._scores: list[_Score] = []
        self._unwanted: set[bytes] = set()
        """Prompts of cancelled requests, perhaps computed ahead."""
        self._arrivals = 0
        self._held: Literal["drain", "freeze"] | None = None
        """`drain`: no admission; `freeze`: no step either."""
        self._is_suspended = False
        self._recomputes = False
        self._aborts = False
        self._is_closed = False
        self._failure: BaseException | None = None
        self._pausers: list[asyncio.Future[None]] = []
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._task: asyncio.Task[None] | None = None
        self._wake_up = asyncio.Event()

    def refuse_if_dead(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine failed before: {self._failure!r}") from self._failure
        if self._is_closed:
            raise EngineError("the engine is closed")

    async def answer(self, generation: Generation) -> Completion:
        self._announce(self._batch.num_free > 0)
        self.waiting.push(generation)
        self._open.add(generation)
        cut = generation.request.cut
        listening = nullcontext() if cut is None else cut.listening(lambda: self._cut(generation))
        try:
            with listening:
                # ends: `_deliver`, or `_fail_all` when serving ends
                return await generation.future
        except asyncio.CancelledError:
            generation.is_cancelled = True
            self._open.discard(generation)
            if generation in self.waiting:
                self.waiting.remove(generation)
                self._unwanted.add(generation.prompt_key)
            elif not self._is_closed:
                self._announce()
            raise

    def _cut(self, generation: Generation) -> None:
        """End an answer where it is: without a token if it still waits for a slot."""
        if generation in self.waiting:
            self.waiting.remove(generation)
            self._unwanted.add(generation.prompt_key)
            generation.finish = "length"
            self._deliver([generation])
        else:
            generation.is_cut = True
            self._announce()

    async def score(self, tokens: IntArray, temperature: float) -> list[float]:
        self._announce()
        score = _Score(tokens, temperature, asyncio.get_running_loop().create_future())
        self._scores.append(score)
        try:
            return await score.future  # ends: `_score_all`, or `_fail_all` when serving ends
        finally:
            if score in self._scores:
                self._scores.remove(score)

    async def pause(self, mode: PauseMode) -> None:
        if mode == "finish":
            self._held = self._held or "drain"
        else:
            self._held = "freeze"
        self._recomputes |= mode == "recompute"
        if mode == "abort":
            self._aborts = True
            self._deliver([_aborted(generation) for generation in self.waiting.drain()])
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pausers.append(future)
        self._announce()
        await future  # ends: `_rest`, `resume`, or `_fail_all` when serving ends

    def resume(self) -> None:
        for future in self._pausers:
            _fail(future, EngineError("the engine was resumed before it had come to rest"))
        self._pausers.clear()
        self._held = None
        self._announce()

    @property
    def is_at_rest(self) -> bool:
        """True if no token can be made before a `resume` or a new request."""
        if self._held is not None:
            return self._held == "freeze" or not self._batch.num_active
        return not self._open and not self._scores

    def suspend(self, is_suspended: bool) -> None:
        """Hold everything, or go on, apart from any pause: what the model needs is missing."""
        self._is_suspended = is_suspended
        self._announce()

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run in the worker thread at the next step boundary."""
        self._batch.is_interrupted = True
        return await self._in_worker(function, *arguments)

    async def close(self) -> None:
        """End the task and fail what is open. Idempotent."""
        self._is_closed = True
        if self._turns is not None:
            self._turns.leave(self._place)
        self._batch.is_interrupted = True
        self._wake_up.set()
        if self._task is not None and self._task.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([self._task])  # ends: after the step that was interrupted above
        self._fail_all(None)
        self._worker.shutdown(wait=True)  # ends: after the step that was interrupted above

    def _announce(self, interrupts: bool = True) -> None:
        """Tell the background task that something changed; start it if there is none."""
        if self._task is None or self._task.done():
            self._wake_up = asyncio.Event()
            self._task = asyncio.create_task(self._serve(), name=self._name)
        elif self._task.get_loop() is not asyncio.get_running_loop():
            raise EngineError("the engine serves another event loop, which was not ended properly")
        self._arrivals += 1
        if self._turns is not None:
            self._turns.moved()
        self._batch.is_interrupted |= interrupts
        self._wake_up.set()

    async def _serve(self) -> None:
        try:
            while True:
                await self._settle()
                if self._is_closed:
                    break
                if not await self._in_turn():
                    self._rest()
                    await self._wake_up.wait()  # ends: `_announce` or `close`
                    self._wake_up.clear()
        except Exception as error:
            self._failure = error
            self._fail_all(error)
        except BaseException as error:
            # The event loop ends with requests open; another one may be served later.
            self._fail_all(error)
            raise

    async def _settle(self) -> None:
        """Let the loop run until nothing new arrives, so that a wave is admitted together."""
        seen, quiet = self._arrivals, 0
        for _ in range(MAX_SETTLE_TURNS):
            await asyncio.sleep(0)
            quiet = quiet + 1 if seen == self._arrivals else 0
            seen = self._arrivals
            if quiet >= SETTLE_TURNS:
                return

    async def _in_turn(self) -> bool:
        """One job, where engines take turns in the engine's own; False if there is none now."""
        if self._turns is None or not self._has_work:
            return await self._turn()
        async with self._turns.turn(self._place):
            self.waiting.sort()
            return await self._turn()

    @property
    def _has_work(self) -> bool:
        if self._aborts:
            return True
        if self._held == "freeze" or self._is_suspended:
            return False
        is_fed = bool(self._scores or self.waiting) and self._held is None
        return is_fed or self._batch.num_active > 0

    async def _turn(self) -> bool:
        """Do one job; False if there is nothing to do now."""
        self._batch.is_interrupted = False
        if self._aborts:
            self._aborts = False
            running = await self._in_worker(self._batch.clear)
            self._deliver([_aborted(generation) for generation in running])
        if self._held == "freeze" or self._is_suspended:
            return False
        if self._scores and self._held is None:
            await self._score_all()
            return True
        if not self._batch.num_active and (self._held or not self.waiting):
            return False
        self._deliver(await self._in_worker(self._batch.run, self._job()))
        return True

    def _job(self) -> Job:
        job = Job(recomputes=self._recomputes)
        self._recomputes = False
        if self._held is None and self.waiting and self._batch.num_free:
            count = min(self._batch.num_free, len(self.waiting))
            job.admit = [self.waiting.pop() for _ in range(count)]
            job.ahead = self.waiting.prompts(self._max_prefill_tokens)
            keys = self._unwanted.union(g.prompt_key for g in job.admit)
            job.released = {key for key in keys if not self.waiting.wants(key)}
            self._unwanted.clear()
        return job

    async def _score_all(self) -> None:
        scores, self._scores = self._scores, []
        rows = [s.tokens for s in scores]
        try:
            found = await self._in_worker(self._batch.score, rows, [s.temperature for s in scores])
        except BaseException as error:
            for score in scores:
                _fail(score.future, _engine_error("scoring failed", error))
            if not isinstance(error, Exception):
                raise
            return
        for score, logprobs in zip(scores, found, strict=True):
            if not score.future.done():
                score.future.set_result(logprobs)

    def _deliver(self, ended: list[Generation]) -> None:
        for generation in ended:
            self._open.discard(generation)
            if generation.error is not None:
                _fail(generation.future, EngineError(generation.error))
            elif not generation.future.done():
                generation.future.set_result(generation.completion())

    def _rest(self) -> None:
        """Tell those who wait for a pause that nothing changes any more."""
        for future in self._pausers:
            if not future.done():
                future.set_result(None)
        self._pausers.clear()

    async def _in_worker(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run in the worker thread, after what runs there now.

        If cancelled, still waits for the function: nothing may run in the thread unattended.
        """
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._worker, function, *arguments)
        try:
            return await asyncio.shield(future)  # ends: with the function, a step at most
        except asyncio.CancelledError:
            self._batch.is_interrupted = True
            await asyncio.wait([future])  # ends: at the step boundary asked for above
            if not future.cancelled():
                future.exception()  # seen, so that asyncio does not report it
            raise

    def _fail_all(self, error: BaseException | None) -> None:
        """Nothing is served any more: tell everybody who waits, at once, and free the slots."""
        for generation in self._open:
            _fail(generation.future, _engine_error("no answer", error))
        for score in self._scores:
            _fail(score.future, _engine_error("no scores", error))
        for future in self._pausers:
            _fail(future, _engine_error("the pause did not come to rest", error))
        self._open.clear()
        self._scores.clear()
        self._pausers.clear()
        self.waiting = WaitingQueue()
        self._batch.clear()


def _aborted(generation: Generation) -> Generation:
    generation.finish, generation.cause = "abort", _ABORT_CAUSE
    return generation


def _engine_error(what: str, cause: BaseException | None) -> EngineError:
    if cause is None:
        return EngineError(f"{what}: the engine was closed")
    if isinstance(cause, asyncio.CancelledError):
        return EngineError(f"{what}: the event loop ended")
    error = EngineError(f"{what}: the engine failed with {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _fail(future: asyncio.Future[Any], error: EngineError) -> None:
    if not future.done():
        future.set_exception(error)
