"""One SGLang server as a replica of an engine: token ids in and out over its own HTTP API.

Parts: `sglang_answers` words requests and reads answers, `sglang_weights` brings weights in,
`sglang_launch` makes the command line, `sglang_open` starts or attaches to servers, `router`
spreads requests over them.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.engines.base import Completion, Part, Request
from paceline.engines.http import JsonClient, RefusedError
from paceline.engines.sglang_answers import (
    completion,
    end_at_stop_text,
    sampling_params,
    scores,
)
from paceline.engines.sglang_weights import SGLangWeights
from paceline.errors import EngineError
from paceline.weights.base import PauseMode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTROL_S = 60.0
"""Seconds for a short command, such as a pause."""
CHECK_S = 15.0
ABORT_AGAIN_S = 0.5
"""A server forgets the abort of a request that has not come to it yet."""
CACHE_S = 600.0
"""Seconds for moving memory of a large model."""
TAGS: dict[Part, str] = {"weights": "weights", "kv_cache": "kv_cache", "graphs": "cuda_graph"}
PAUSED = "the engine was paused in mode abort"


@dataclass(frozen=True, slots=True)
class Served:
    """What is known of the servers of one engine."""

    policy: str
    eos_token_ids: frozenset[int]
    max_context: int
    """Most tokens of prompt plus answer."""
    vocab_size: int
    tokenizer: PreTrainedTokenizerBase | None
    request_timeout_s: float
    update_timeout_s: float = 600.0
    """Seconds that one part of new weights may take."""
    moves_memory: bool = False
    """Whether servers can give memory back: they run on a GPU and were started for it."""
    num_devices: int = 1
    compares: bool = False
    """Whether servers that are started here can compare their weights, on a GPU, and begin with
    those that the trainer begins with."""


@dataclass(slots=True, eq=False)
class _Open:
    is_over: asyncio.Event
    is_ended: bool = False
    """By a pause of mode abort."""


class SGLangReplica:
    """Implements `paceline.engines.replica.Replica`. Made when the server is healthy."""

    def __init__(
        self, url: str, client: JsonClient, served: Served, *, index: int, is_ours: bool
    ) -> None:
        """index: among the replicas of the engine. is_ours: whether this program started it."""
        self.name = url
        self._client, self._served, self._is_ours = client, served, is_ours
        self.weights = SGLangWeights(
            url,
            client,
            policy=served.policy,
            first_device=index * served.num_devices,
            num_devices=served.num_devices,
            timeout_s=served.update_timeout_s,
            takes_pickles=is_ours,
            compares=served.compares and is_ours,
        )
        self._prefix, self._numbers = uuid.uuid4().hex[:12], itertools.count()
        self._open: dict[str, _Open] = {}
        """Requests at the server, by id."""
        self._idle = asyncio.Event()
        self._longest_prompt = served.max_context

    async def look(self) -> None:
        """Learn what the server is like. Raises LostServerError while it is not healthy, and
        EngineError if it can not be this engine's."""
        await self._get("/health_generate")
        found = await self._get("/server_info", "/get_server_info")
        if not isinstance(found, dict):
            raise EngineError(f"{self.name} does not speak SGLang's native HTTP API")
        if isinstance(longest := found.get("max_req_input_len"), int):
            self._longest_prompt = min(self._longest_prompt, longest - 1)
        devices = found.get("tp_size", 1)
        if devices != self._served.num_devices:
            raise EngineError(
                f"{self.name} is spread over {devices} devices: set engine.tensor_parallel = "
                f"{devices}"
            )

    async def generate(self, request: Request) -> Completion:
        limit = self._limit(request)
        if limit < 1 or (request.cut is not None and request.cut.is_set):
            return Completion([], [], [], "length")
        sampling, version = request.sampling, self.weights.held
        if sampling.stop and not sampling.ignore_eos and self._served.tokenizer is None:
            raise EngineError("stop texts need a tokenizer, and this engine was made without one")
        body = {
            "input_ids": list(request.tokens),
            "sampling_params": sampling_params(
                sampling,
                limit=limit,
                seed=request.seed,
                end_ids=self._served.eos_token_ids,
            ),
        }
        answer, is_ended = await self._generate(body, request)
        made = completion(answer, version=version)
        if is_ended and made.finish == "abort":
            made.can_go_on, made.cause = True, PAUSED
        if request.cut is not None and request.cut.is_set and made.finish == "abort":
            made.finish, made.cause, made.can_go_on = "length", None, False
        if sampling.stop and not sampling.ignore_eos and self._served.tokenizer is not None:
            first = len(request.tokens) - request.num_sampled
            before = request.tokens[max(first, 0) :] if request.num_sampled else ()
            end_at_stop_text(made, sampling.stop, self._served.tokenizer, before)
        if request.progress is not None:
            request.progress.num_tokens += len(made.tokens)
        return made

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        if temperature not in (0.0, 1.0):
            raise EngineError(
                f"SGLang gives the log-probs of a prompt at temperature 1 only, not at "
                f"{temperature:g}: let the trainer score (Trainer.forward)"
            )
        self._check(tokens, "sequence to score")
        if len(tokens) > self._longest_prompt:
            raise EngineError(
                f"the sequence to score has {len(tokens)} tokens, and the server takes "
                f"{self._longest_prompt}: raise engine.max_context as far as the model allows"
            )
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "logprob_start_len": 0,
        }
        answer, _ = await self._generate(body, None)
        return scores(answer, tokens)

    async def check(self) -> None:
        await self._get("/model_info", "/get_model_info")

    async def pause(self, mode: PauseMode) -> None:
        match mode:
            case "keep":
                await self._control("/pause_generation", {"mode": "in_place"})
            case "recompute" | "finish":
                # A server has no mode that waits: its owner does. Nothing runs, or all is requeued.
                await self._control("/pause_generation", {"mode": "retract"})
            case "abort":
                await self._end_all()
                await self._control("/pause_generation", {"mode": "retract"})
        self.weights.keeps_running = mode == "keep" and bool(self._open)

    async def resume(self) -> None:
        await self._control("/continue_generation", {})
        self.weights.keeps_running = False

    async def sleep(self, parts: frozenset[Part]) -> None:
        if self._served.moves_memory and parts:
            tags = sorted(TAGS[part] for part in parts)
            await self._control("/release_memory_occupation", {"tags": tags}, CACHE_S)

    async def wake(self, parts: frozenset[Part]) -> None:
        if self._served.moves_memory and parts:
            tags = sorted(TAGS[part] for part in parts)
            await self._control("/resume_memory_occupation", {"tags": tags}, CACHE_S)

    def _check(self, tokens: Sequence[int], what: str) -> None:
        """A token that the model does not know would end some servers."""
        if not tokens:
            raise EngineError(f"the {what} is empty: a model needs one token to go on from")
        lowest, highest = min(tokens), max(tokens)
        if lowest < 0 or highest >= self._served.vocab_size:
            raise EngineError(
                f"the {what} has token ids from {lowest} to {highest}, and the model knows 0 to "
                f"{self._served.vocab_size - 1}: is the tokenizer another model's?"
            )

    def _limit(self, request: Request) -> int:
        """Most new tokens; below 1 if the context has no room for one."""
        prompt = len(request.tokens)
        self._check(request.tokens, "prompt")
        if prompt > self._served.max_context:
            raise EngineError(
                f"the prompt has {prompt} tokens, and the context holds "
                f"{self._served.max_context}: shorten it, filter it out, or raise "
                "`engine.max_context` as far as the model allows"
            )
        if prompt > self._longest_prompt:
            return 0
        room = self._served.max_context - prompt
        return min(request.sampling.max_tokens - request.num_sampled, room)

    async def _generate(self, body: dict[str, Any], request: Request | None) -> tuple[Any, bool]:
        """The answer, and whether a pause ended it. However the wait ends, nothing goes on at the
        server."""
        rid = f"{self._prefix}-{next(self._numbers)}"
        body |= {"rid": rid, "return_logprob": True, "stream": False}
        if (salt := self.weights.salt) is not None:
            body["extra_key"] = salt
        own = self._open[rid] = _Open(asyncio.Event())
        self._idle.clear()
        try:
            with self._cutting(rid, request):
                answer = await self._client.request(
                    self.name, "/generate", body, timeout_s=self._served.request_timeout_s
                )
                return answer, own.is_ended
        except RefusedError as error:
            raise EngineError(f"{self.name} refused a request: {error.text}") from None
        except BaseException:
            self._client.leave(self._abort(rid))
            raise
        finally:
            own.is_over.set()
            del self._open[rid]
            if not self._open:
                self._idle.set()

    @contextmanager
    def _cutting(self, rid: str, request: Request | None) -> Iterator[None]:
        """End the answer at the server when its request is cut."""
        if request is None or request.cut is None:
            yield
            return
        tasks: list[asyncio.Task[None]] = []
        with request.cut.listening(lambda: tasks.append(self._client.leave(self._end(rid)))):
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    async def _end(self, rid: str) -> None:
        """Abort until the answer is there."""
        while (own := self._open.get(rid)) is not None:
            await self._abort(rid)
            await _within(own.is_over, ABORT_AGAIN_S)

    async def _end_all(self) -> None:
        """Abort all that this replica was asked for, until it has answered."""
        if self._open:
            # What is paused can not end.
            await self._control("/continue_generation", {})
        while self._open:
            for own in self._open.values():
                own.is_ended = True
            if self._is_ours:
                await self._control("/abort_request", {"rid": "", "abort_all": True})
            else:
                # ends: each by its time limit
                await asyncio.gather(*(self._abort(rid) for rid in list(self._open)))
            await _within(self._idle, ABORT_AGAIN_S)

    async def _abort(self, rid: str) -> None:
        await self._control("/abort_request", {"rid": rid, "abort_all": False})

    async def _control(self, path: str, body: dict[str, Any], timeout_s: float = CONTROL_S) -> Any:
        try:
            return await self._client.request(self.name, path, body, timeout_s=timeout_s)
        except RefusedError as error:
            raise EngineError(str(error)) from None

    async def _get(self, *paths: str) -> Any:
        """The first of the paths that the server knows."""
        for path in paths[:-1]:
            try:
                return await self._client.request(self.name, path, timeout_s=CHECK_S)
            except RefusedError:
                continue
        try:
            return await self._client.request(self.name, paths[-1], timeout_s=CHECK_S)
        except RefusedError as error:
            raise EngineError(str(error)) from None


async def _within(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass
