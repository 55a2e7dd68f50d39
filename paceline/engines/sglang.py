"""One SGLang server as a replica of an engine: token ids in and out over its own HTTP API.

Parts: `sglang_requests` asks for answers, `sglang_answers` words requests and reads answers,
`sglang_weights` brings weights in, `sglang_launch` makes the command line, `sglang_open` starts or
attaches to servers, `router` spreads requests over them, or `sglang_router`: SGLang's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from paceline.engines.base import Completion, Part, Request
from paceline.engines.http import JsonClient, RefusedError
from paceline.engines.open_requests import OpenRequests
from paceline.engines.served import Served
from paceline.engines.sglang_answers import scores
from paceline.engines.sglang_requests import SGLangRequests
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


class SGLangReplica:
    """Implements `paceline.engines.replica.Replica`. Made when the server is healthy."""

    def __init__(
        self,
        url: str,
        client: JsonClient,
        served: Served,
        *,
        index: int,
        is_ours: bool,
        open: OpenRequests | None = None,
    ) -> None:
        """index: among the replicas of the engine. is_ours: whether this program started it. open:
        requests that may be open here, though they were asked for elsewhere: a router's."""
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
        self._open = OpenRequests(client, self.abort) if open is None else open
        self._requests = SGLangRequests(client, served, self._open)
        self.longest_prompt = served.max_context

    async def look(self) -> None:
        """Learn what the server is like. Raises LostServerError while it is not healthy, and
        EngineError if it can not be this engine's."""
        await self._get("/health_generate")
        found = await self._get("/server_info", "/get_server_info")
        if not isinstance(found, dict):
            raise self._is_foreign("its /server_info is no table")
        if isinstance(longest := found.get("max_req_input_len"), int):
            self.longest_prompt = min(self.longest_prompt, longest - 1)
        devices = found.get("tp_size", 1)
        if devices != self._served.num_devices:
            raise EngineError(
                f"{self.name} is spread over {devices} devices: set engine.tensor_parallel = "
                f"{devices}"
            )

    async def generate(self, request: Request) -> Completion:
        return await self._requests.answer(
            self.name,
            request,
            longest_prompt=self.longest_prompt,
            version=self.weights.held,
            salt=self.weights.salt,
        )

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        if temperature not in (0.0, 1.0):
            raise EngineError(
                f"SGLang gives the log-probs of a prompt at temperature 1 only, not at "
                f"{temperature:g}: let the trainer score (Trainer.forward)"
            )
        self._served.check(tokens, "sequence to score")
        if len(tokens) > self.longest_prompt:
            raise EngineError(
                f"the sequence to score has {len(tokens)} tokens, and the server takes "
                f"{self.longest_prompt}: raise engine.max_context as far as the model allows"
            )
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "logprob_start_len": 0,
        }
        answer, _ = await self._requests.post(self.name, body, self.weights.salt)
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

    async def _end_all(self) -> None:
        """Abort all that this replica was asked for, until it has answered."""
        if self._open:
            # What is paused can not end.
            await self._control("/continue_generation", {})
        # What others ask of a server that is not ours goes on.
        await self._open.end_all(self._abort_everything if self._is_ours else self.abort)

    async def _abort_everything(self, rids: Sequence[str]) -> None:
        await self._control("/abort_request", {"rid": "", "abort_all": True})

    async def abort(self, rids: Sequence[str]) -> None:
        """End these requests, as far as they are open here."""
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
