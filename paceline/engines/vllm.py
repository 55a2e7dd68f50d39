"""One vLLM server as a replica of an engine: token ids in and out over its own HTTP API.

Parts: `vllm_answers` words requests and reads answers, `vllm_weights` brings weights in, with
`vllm_server` in the server's own processes, `vllm_launch` makes the command line, `vllm_open`
starts or attaches to servers, `router` spreads requests over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from paceline.engines.answers import settle
from paceline.engines.base import Completion, CutSignal, Part, Request
from paceline.engines.http import JsonClient, RefusedError
from paceline.engines.open_requests import OpenRequests
from paceline.engines.served import Served
from paceline.engines.vllm_answers import completion, sampling_params, scores, scoring_params
from paceline.engines.vllm_launch import EXTENSION, LOGPROBS
from paceline.engines.vllm_weights import VLLMWeights
from paceline.errors import EngineError
from paceline.weights.base import PauseMode

CONTROL_S = 60.0
"""Seconds for a short command, such as a pause."""
CHECK_S = 15.0
SERVER_INFO, NOT_FOUND = "/server_info?config_format=json", 404
CACHE_S = 600.0
"""Seconds for moving memory of a large model."""
PREFIX = "generate-tokens-"
"""What the server puts before the ids of requests."""
TAGS: frozenset[Part] = frozenset(("weights", "kv_cache"))


class VLLMReplica:
    """Implements `paceline.engines.replica.Replica`. Made when the server is healthy."""

    def __init__(
        self, url: str, client: JsonClient, served: Served, *, index: int, is_ours: bool
    ) -> None:
        """index: among the replicas of the engine. is_ours: whether this program started it."""
        self.name = url
        self._client, self._served, self._is_ours = client, served, is_ours
        self.weights = VLLMWeights(
            url,
            client,
            policy=served.policy,
            first_device=index * served.num_devices,
            num_devices=served.num_devices,
            timeout_s=served.update_timeout_s,
            takes_pickles=is_ours,
        )
        self._open = OpenRequests(client, self._abort)
        self._longest_prompt = served.max_context - 1
        self._is_paused = False
        self._asked: frozenset[Part] = frozenset()
        """Parts that were put to sleep, of which `_asleep` are: not without the KV cache."""
        self._asleep: frozenset[Part] = frozenset()

    async def look(self) -> None:
        """Learn what the server is like. Raises LostServerError while it is not healthy, and
        EngineError if it can not be this engine's."""
        try:
            await self._client.request(self.name, "/health", timeout_s=CHECK_S)
            found = await self._client.request(self.name, SERVER_INFO, timeout_s=CONTROL_S)
        except RefusedError as error:
            if error.status != NOT_FOUND:
                raise EngineError(str(error)) from None
            raise EngineError(
                f"{self.name} is no vLLM server, or was started without VLLM_SERVER_DEV_MODE=1 "
                f"({error}): correct engine.urls or engine.kind, or start it with that"
            ) from None
        config = found.get("vllm_config") if isinstance(found, dict) else None
        if not isinstance(config, dict):
            raise EngineError(f"{self.name} does not speak vLLM's HTTP API")
        self._compare(config)
        # A server that is healthy may not survive its first token, such as one of a model whose
        # attention it has no kernel for.
        params = {"max_tokens": 1, "detokenize": False}
        await self._generate({"token_ids": [0], "sampling_params": params})

    def _compare(self, config: dict[str, Any]) -> None:
        model, parallel = config["model_config"], config["parallel_config"]
        self._longest_prompt = min(self._longest_prompt, int(model["max_model_len"]) - 1)
        if (mode := model.get("logprobs_mode")) != LOGPROBS:
            raise EngineError(
                f"{self.name} gives log-probs of mode {mode!r}, and training needs those of the "
                f"distribution that was sampled from: start it with --logprobs-mode {LOGPROBS}"
            )
        if (extension := parallel.get("worker_extension_cls")) != EXTENSION:
            raise EngineError(
                f"{self.name} has {extension or 'no'} worker extension, and new weights need "
                f"{EXTENSION}: start it with --worker-extension-cls {EXTENSION}, and with the "
                "folder paceline/engines/vllm_server on its PYTHONPATH"
            )
        devices, own = parallel["tensor_parallel_size"], self._served.num_devices
        if devices != own:
            raise EngineError(
                f"{self.name} is spread over {devices} devices: set engine.tensor_parallel = "
                f"{devices}"
            )
        for other in ("pipeline_parallel_size", "data_parallel_size"):
            if parallel.get(other, 1) != 1:
                raise EngineError(
                    f"{self.name} has {other} = {parallel[other]}: weights are sent to servers "
                    "of tensor parallelism alone"
                )

    async def generate(self, request: Request) -> Completion:
        limit = self._served.room(request, self._longest_prompt)
        if limit < 1 or (request.cut is not None and request.cut.is_set):
            return Completion([], [], [], "length")
        sampling, version = request.sampling, self.weights.held
        if sampling.stop and not sampling.ignore_eos and self._served.tokenizer is None:
            raise EngineError("stop texts need a tokenizer, and this engine was made without one")
        params = sampling_params(
            sampling,
            limit=limit,
            seed=request.seed,
            num_sampled=request.num_sampled,
            end_ids=self._served.eos_token_ids,
        )
        body = {"token_ids": list(request.tokens), "sampling_params": params}
        answer, is_ended = await self._generate(body, request.cut)
        made = completion(answer, version=version)
        settle(made, request, self._served.tokenizer, is_ended=is_ended)
        return made

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        if temperature not in (0.0, 1.0):
            raise EngineError(
                f"vLLM gives the log-probs of a prompt at temperature 1 only, not at "
                f"{temperature:g}: let the trainer score (Trainer.forward)"
            )
        self._served.check(tokens, "sequence to score")
        if len(tokens) > self._longest_prompt:
            raise EngineError(
                f"the sequence to score has {len(tokens)} tokens, and the server takes "
                f"{self._longest_prompt}: raise engine.max_context as far as the model allows"
            )
        body = {"token_ids": list(tokens), "sampling_params": scoring_params()}
        answer, _ = await self._generate(body)
        return scores(answer, tokens)

    async def check(self) -> None:
        await self._control("/health", method="GET", timeout_s=CHECK_S)

    async def pause(self, mode: PauseMode) -> None:
        """vLLM's own mode `abort` would end what others ask of a server that is not ours, and
        `wait` would make tokens that its owner has not waited for."""
        if mode == "abort":
            await self._open.end_all(self._abort_everything if self._is_ours else None)
        self._is_paused = True
        # Without its cache, what is frozen is computed anew when it goes on.
        await self._freeze(clears=mode != "keep")
        self.weights.keeps_running = mode == "keep" and len(self._open) > 0

    async def resume(self) -> None:
        self._is_paused = False
        await self._control("/resume")
        self.weights.keeps_running = False

    async def sleep(self, parts: frozenset[Part]) -> None:
        if not self._served.moves_memory or not parts & TAGS:
            return
        if self._open:
            raise EngineError(
                f"{self.name}: vLLM can not keep requests while its memory is away: let them end "
                'before, or end them (rollout.pause = "finish" or "abort")'
            )
        self._asked |= parts & TAGS
        if "weights" in parts:
            # Its level 2 drops the KV cache as well.
            query = {"level": 2, "mode": "keep"}
            await self._control("/sleep", query, timeout_s=CACHE_S)
            self._asleep = TAGS
        elif "kv_cache" not in self._asleep:
            await self._freeze(clears=True)
            await self._control("/release_kv_cache_memory", timeout_s=CACHE_S)
            self._asleep |= {"kv_cache"}

    async def wake(self, parts: frozenset[Part]) -> None:
        tags = frozenset(t for t in self._asleep if t in parts or t not in self._asked)
        if not tags:
            return
        await self._control("/wake_up", [("tags", t) for t in sorted(tags)], timeout_s=CACHE_S)
        self._asleep -= tags
        self._asked -= parts
        if self._is_paused and not self._asleep:
            await self._freeze(clears=True)  # it goes on when it is awake

    async def _freeze(self, *, clears: bool) -> None:
        await self._control("/pause", {"mode": "keep", "clear_cache": str(clears).lower()})

    async def _generate(
        self, body: dict[str, Any], cut: CutSignal | None = None
    ) -> tuple[Any, bool]:
        """The answer, and whether a pause ended it. However the wait ends, nothing goes on at the
        server."""
        rid = self._open.new_id()
        body["request_id"] = rid
        if (salt := self.weights.salt) is not None:
            body["cache_salt"] = salt
        answer = self._client.request(
            self.name, "/inference/v1/generate", body, timeout_s=self._served.request_timeout_s
        )
        try:
            return await self._open.run(rid, cut, answer)
        except RefusedError as error:
            raise EngineError(f"{self.name} refused a request: {error.text}") from None

    async def _abort(self, rids: Sequence[str]) -> None:
        await self._control("/abort_requests", body={"request_ids": [PREFIX + r for r in rids]})

    async def _abort_everything(self, rids: Sequence[str]) -> None:
        await self._control("/abort_requests", body={})

    async def _control(
        self,
        path: str,
        query: dict[str, Any] | list[tuple[str, str]] | None = None,
        *,
        body: Any = None,
        method: str = "POST",
        timeout_s: float = CONTROL_S,
    ) -> Any:
        whole = f"{path}?{urlencode(query)}" if query else path
        try:
            return await self._client.request(
                self.name, whole, body, timeout_s=timeout_s, method=method
            )
        except RefusedError as error:
            raise EngineError(str(error)) from None
