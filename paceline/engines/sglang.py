"""One SGLang server as a replica of an engine: token ids in and out over its own HTTP API.

Parts: `sglang_answers` words requests and reads answers, `sglang_weights` brings weights in,
`sglang_launch` makes the command line, `sglang_open` starts or attaches to servers, `router`
spreads requests over them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from paceline.engines.answers import end_at_stop_text
from paceline.engines.base import Completion, CutSignal, Part, Request
from paceline.engines.http import JsonClient, RefusedError
from paceline.engines.open_requests import OpenRequests
from paceline.engines.served import Served
from paceline.engines.sglang_answers import (
    completion,
    sampling_params,
    scores,
)
from paceline.engines.sglang_weights import SGLangWeights
from paceline.errors import EngineError
from paceline.weights.base import PauseMode

CONTROL_S = 60.0
"""Seconds for a short command, such as a pause."""
CHECK_S = 15.0
NOT_FOUND = 404
CACHE_S = 600.0
"""Seconds for moving memory of a large model."""
TAGS: dict[Part, str] = {"weights": "weights", "kv_cache": "kv_cache", "graphs": "cuda_graph"}
PAUSED = "the engine was paused in mode abort"


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
        self._open = OpenRequests(client, self._abort)
        self._longest_prompt = served.max_context

    async def look(self) -> None:
        """Learn what the server is like. Raises LostServerError while it is not healthy, and
        EngineError if it can not be this engine's."""
        await self._get("/health_generate")
        found = await self._get("/server_info", "/get_server_info")
        if not isinstance(found, dict):
            raise self._is_foreign("its /server_info is no table")
        if isinstance(longest := found.get("max_req_input_len"), int):
            self._longest_prompt = min(self._longest_prompt, longest - 1)
        devices = found.get("tp_size", 1)
        if devices != self._served.num_devices:
            raise EngineError(
                f"{self.name} is spread over {devices} devices: set engine.tensor_parallel = "
                f"{devices}"
            )

    async def generate(self, request: Request) -> Completion:
        limit = self._served.room(request, self._longest_prompt)
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
        answer, is_ended = await self._generate(body, request.cut)
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
        self._served.check(tokens, "sequence to score")
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
        answer, _ = await self._generate(body)
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

    async def _generate(
        self, body: dict[str, Any], cut: CutSignal | None = None
    ) -> tuple[Any, bool]:
        """The answer, and whether a pause ended it. However the wait ends, nothing goes on at the
        server."""
        rid = self._open.new_id()
        body |= {"rid": rid, "return_logprob": True, "stream": False}
        if (salt := self.weights.salt) is not None:
            body["extra_key"] = salt
        answer = self._client.request(
            self.name, "/generate", body, timeout_s=self._served.request_timeout_s
        )
        try:
            return await self._open.run(rid, cut, answer)
        except RefusedError as error:
            raise EngineError(f"{self.name} refused a request: {error.text}") from None

    async def _end_all(self) -> None:
        """Abort all that this replica was asked for, until it has answered."""
        if self._open:
            # What is paused can not end.
            await self._control("/continue_generation", {})
        # What others ask of a server that is not ours goes on.
        await self._open.end_all(self._abort_everything if self._is_ours else None)

    async def _abort_everything(self, rids: Sequence[str]) -> None:
        await self._control("/abort_request", {"rid": "", "abort_all": True})

    async def _abort(self, rids: Sequence[str]) -> None:
        # ends: each by its time limit
        await asyncio.gather(
            *(self._control("/abort_request", {"rid": r, "abort_all": False}) for r in rids)
        )

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
            if error.status == NOT_FOUND:
                raise self._is_foreign(f"it knows no {paths[-1]}") from None
            raise EngineError(str(error)) from None

    def _is_foreign(self, why: str) -> EngineError:
        return EngineError(
            f"{self.name} does not speak SGLang's native HTTP API ({why}): correct engine.urls, or "
            "engine.kind"
        )
