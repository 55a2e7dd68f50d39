"""The embedded engine: any transformers causal LM in this process, with continuous batching.

    generate --Generation--> WaitingQueue --Job--> Batch.run (worker thread) --ended--> futures

The event loop owns what waits, the futures and the pause; the worker thread owns the model, the
cache and the running batch, and is the only place where torch works. One background task couples
them: let arrivals settle, hand over a job, deliver what ended. A job ends when a sequence ends or
when the loop has something to say (an arrival with a free slot, a pause, a cancellation).
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from paceline.engines.base import Completion, EmbeddedEngineConfig, Part, Request
from paceline.engines.embedded_batch import Batch, Counts, Job
from paceline.engines.embedded_model import CachedModel
from paceline.engines.embedded_queue import Generation, Intake, WaitingQueue
from paceline.engines.embedded_sampler import IntArray
from paceline.engines.embedded_weights import OwnWeights
from paceline.errors import EngineError, WeightError
from paceline.weights.base import PauseMode, WeightPlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

SETTLE_TURNS = 8
"""Turns of the event loop without a new request after which a wave counts as complete."""
MAX_SETTLE_TURNS = 1000
"""A source that never stops submitting may not hold up those that wait."""


@dataclass(slots=True, eq=False)
class _Score:
    tokens: IntArray
    temperature: float
    future: asyncio.Future[list[float]]


class EmbeddedEngine:
    """Serves one policy from one module, on the device the module is on.

    With `weights = "copy"` the engine makes a copy of the module and takes weights by `receive`
    alone. Otherwise it uses the given module as it stands, which may be the trainer's own: it is
    never changed, and its mode is put back after each job; whoever trains it must keep the engine
    paused or idle meanwhile.

    Greedy answers (temperature 0) carry the log-probs their tokens have at temperature 1.

    Raises:
        EngineError: the model can not be served with a plain key-value cache (found by comparing
            cached with uncached log-probs of a few random tokens).
    """

    def __init__(
        self,
        config: EmbeddedEngineConfig,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        policy: str,
        eos_token_ids: frozenset[int],
        version: int = 0,
    ) -> None:
        self.policy = policy
        self._weights: OwnWeights | None = None
        if config.weights == "copy":
            model = copy.deepcopy(model).requires_grad_(False).eval()
            self._weights = OwnWeights(model)
        self._model = CachedModel(model)
        limits = [n for n in (config.max_context, self._model.max_positions) if n is not None]
        max_context = min(limits, default=None)
        self._intake = Intake(
            vocab_size=self._model.vocab_size,
            max_context=max_context,
            eos_token_ids=eos_token_ids,
            has_tokenizer=tokenizer is not None,
        )
        self._max_prefill_tokens = config.max_prefill_tokens
        self._batch = Batch(
            self._model,
            max_batch=config.max_batch,
            max_positions=max_context,
            max_prefill_tokens=config.max_prefill_tokens,
            version=version,
            tokenizer=tokenizer,
        )
        self._waiting = WaitingQueue()
        self._open: set[Generation] = set()
        """All that wait, run, or ended and were not delivered."""
        self._scores: list[_Score] = []
        self._arrivals = 0
        self._held: str | None = None
        """`drain`: no admission; `freeze`: no step either."""
        self._recompute = False
        self._aborting = False
        self._asleep: frozenset[Part] = frozenset()
        self._lacks_weights = False
        self._is_closed = False
        self._failure: BaseException | None = None
        self._pausers: list[asyncio.Future[None]] = []
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"engine-{policy}")
        self._task: asyncio.Task[None] | None = None
        self._wake_up = asyncio.Event()

    @property
    def version(self) -> int:
        """Version of the weights that the next token is made with."""
        return self._batch.version

    @property
    def counts(self) -> Counts:
        """Work done since the engine was made."""
        return self._batch.counts

    @property
    def num_running(self) -> int:
        return self._batch.num_active

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def generate(self, request: Request) -> Completion:
        self._refuse_if_unusable()
        sequence = self._intake.generation(request)
        if sequence.limit < 1:
            return Completion([], [], [], "length")
        self._announce(self._batch.num_free > 0)
        self._waiting.push(sequence)
        self._open.add(sequence)
        try:
            return await sequence.future
        except asyncio.CancelledError:
            sequence.is_cancelled = True
            self._open.discard(sequence)
            if sequence in self._waiting:
                self._waiting.remove(sequence)
            elif not self._is_closed:
                self._announce()
            raise

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """As the protocol says; a temperature of 0 counts as 1, as it does for greedy answers."""
        self._refuse_if_unusable()
        if temperature < 0:
            raise EngineError(f"temperature is {temperature}: give one that is not negative")
        future: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        score = _Score(self._intake.checked(tokens, "sequence to score"), temperature, future)
        self._scores.append(score)
        self._announce()
        try:
            return await future
        finally:
            if score in self._scores:
                self._scores.remove(score)

    async def receive(self, plan: WeightPlan) -> None:
        self._refuse_if_dead()
        if plan.policy != self.policy:
            raise WeightError(
                f"weights of policy {plan.policy!r} were sent to the engine of {self.policy!r}"
            )
        expected = "shared" if self._weights is None else "copy"
        if plan.transport != expected or (plan.tensors is None and self._weights is not None):
            raise WeightError(
                f"the engine of {self.policy!r} takes transport {expected!r}"
                f"{'' if self._weights is None else ' with tensors'}, and was sent "
                f"{plan.transport!r} {'without' if plan.tensors is None else 'with'} tensors"
            )
        self._batch.is_interrupted = True
        await self._in_worker(self._take, plan)
        self._lacks_weights = False
        self._announce()

    def _take(self, plan: WeightPlan) -> None:
        if self._weights is not None and plan.tensors is not None:
            self._weights.copy(plan.tensors)
        self._batch.forget_prefixes()
        self._batch.version = plan.version

    async def pause(self, mode: PauseMode) -> None:
        """Stop making tokens. A second pause only stops more; `resume` ends both.

        Requests that arrive meanwhile, and scores, wait until `resume`.
        """
        self._refuse_if_dead()
        if mode == "finish":
            self._held = self._held or "drain"
        else:
            self._held = "freeze"
        self._recompute |= mode == "recompute"
        self._aborting |= mode == "abort"
        future = asyncio.get_running_loop().create_future()
        self._pausers.append(future)
        self._announce()
        await future

    async def resume(self) -> None:
        self._refuse_if_dead()
        for future in self._pausers:
            _fail(future, EngineError("the engine was resumed before it had come to rest"))
        self._pausers.clear()
        self._batch.is_stale |= self._recompute and self._batch.num_active > 0
        self._held, self._recompute, self._aborting = None, False, False
        self._announce()

    async def sleep(self, parts: frozenset[Part]) -> None:
        """Free the parts. Weights are freed only if they are the engine's own copy."""
        self._refuse_if_dead()
        if self._held != "freeze" and (self._batch.num_active or self._waiting):
            raise EngineError(
                f"the engine can not sleep with {self._batch.num_active} running and "
                f"{len(self._waiting)} waiting requests: pause it first"
            )
        new = parts - self._asleep
        self._asleep |= parts
        self._lacks_weights |= "weights" in new and self._weights is not None
        await self._in_worker(self._free, new)

    def _free(self, parts: frozenset[Part]) -> None:
        if "kv_cache" in parts:
            self._batch.drop_cache()
        if "weights" in parts and self._weights is not None:
            self._weights.drop()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    async def wake(self, parts: frozenset[Part]) -> None:
        self._refuse_if_dead()
        if "weights" in parts & self._asleep and self._weights is not None:
            await self._in_worker(self._weights.allocate)
        self._asleep -= parts
        self._announce()

    async def aclose(self) -> None:
        """End the background task, fail what waits, free the memory. Idempotent."""
        self._is_closed = True
        self._announce(starts=False)
        if self._task is not None and self._task.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([self._task])
        self._fail_all(None)
        self._worker.shutdown(wait=True)
        self._batch.abort("the engine was closed")
        self._batch.drop_cache()

    def _refuse_if_dead(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine failed before: {self._failure!r}") from self._failure
        if self._is_closed:
            raise EngineError("the engine is closed")

    def _refuse_if_unusable(self) -> None:
        self._refuse_if_dead()
        if self._asleep:
            raise EngineError(
                f"the engine is asleep ({', '.join(sorted(self._asleep))}): wake it first"
            )
        if self._lacks_weights:
            raise EngineError(
                "the engine's weights were dropped while it slept, and none were received since: "
                "publish first"
            )

    def _announce(self, interrupts: bool = True, *, starts: bool = True) -> None:
        """Tell the background task that something changed; start it if there is none."""
        self._arrivals += 1
        self._batch.is_interrupted |= interrupts
        loop = asyncio.get_running_loop()
        task = self._task
        if starts and (task is None or task.done() or task.get_loop().is_closed()):
            self._wake_up = asyncio.Event()
            self._task = loop.create_task(self._serve(), name=f"engine-{self.policy}")
        elif task is not None and task.get_loop() is not loop and starts:
            raise EngineError("the engine serves another event loop: close it there first")
        self._wake_up.set()

    async def _serve(self) -> None:
        try:
            while not self._is_closed:
                await self._settle()
                if self._is_closed or not await self._turn():
                    self._rest()
                    await self._wake_up.wait()
                    self._wake_up.clear()
        except Exception as error:
            self._failure = error
            self._fail_all(error)
        except BaseException as error:
            # The loop ends with requests open; another loop may serve again.
            self._fail_all(error)
            raise
        else:
            self._fail_all(None)

    async def _settle(self) -> None:
        """Let the loop run until nothing new arrives, so that a wave is admitted together."""
        seen, quiet = self._arrivals, 0
        for _ in range(MAX_SETTLE_TURNS):
            await asyncio.sleep(0)
            quiet = quiet + 1 if seen == self._arrivals else 0
            seen = self._arrivals
            if quiet >= SETTLE_TURNS:
                return

    async def _turn(self) -> bool:
        """Do one job; False if there is nothing to do now."""
        self._batch.is_interrupted = False
        if self._aborting:
            self._aborting = False
            cause = "the engine was paused in mode abort"
            self._deliver(await self._in_worker(self._batch.abort, cause))
            for sequence in self._waiting.drain():
                sequence.finish, sequence.cause = "abort", cause
                self._deliver([sequence])
        if self._held == "freeze" or self._asleep or self._lacks_weights:
            return False
        if self._scores and self._held is None:
            await self._score_all()
        job = self._job() if self._held is None else Job()
        if not job.admit and not self._batch.num_active:
            return False
        self._deliver(await self._in_worker(self._batch.run, job))
        return True

    def _job(self) -> Job:
        count = min(self._batch.num_free, len(self._waiting))
        admit = [self._waiting.pop() for _ in range(count)]
        if not admit:
            return Job()
        released = {s.prompt_key for s in admit if not self._waiting.wants(s.prompt_key)}
        return Job(admit, self._waiting.prompts(self._max_prefill_tokens), released)

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
        for sequence in ended:
            self._open.discard(sequence)
            if sequence.error is not None:
                _fail(sequence.future, EngineError(sequence.error))
            elif not sequence.future.done():
                sequence.future.set_result(sequence.completion())

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
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._batch.is_interrupted = True
            await asyncio.wait([future])
            future.cancelled() or future.exception()
            raise

    def _fail_all(self, error: BaseException | None) -> None:
        """Nothing is served any more: tell everybody who waits, at once, and free the slots."""
        for sequence in list(self._open):
            _fail(sequence.future, _engine_error("no answer", error))
        for score in self._scores:
            _fail(score.future, _engine_error("no scores", error))
        for future in self._pausers:
            _fail(future, _engine_error("the pause did not come to rest", error))
        self._open.clear()
        self._scores.clear()
        self._pausers.clear()
        for _ in self._waiting.drain():
            pass
        self._batch.abort("the engine stopped")


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
