"""A role that is played by a model behind an OpenAI-compatible endpoint. It does not learn.

Talks messages, not tokens: what it said is kept as text.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import httpx2

from paceline.engines.base import CutSignal, Sampling
from paceline.errors import ConfigError, EngineError
from paceline.rollout.env import Reply
from paceline.types import Draw, Message, Prompt, Sample, Status

MAX_BACKOFF_S = 30.0
"""Longest pause before a request is sent again, also if the endpoint asks for more."""
MAX_SEED = 2**31
"""Endpoints that know seeds take at least this many."""
SHOWN = 300
"""Characters of an endpoint's complaint that are passed on."""


class EndpointSeat:
    """Asks `url`/chat/completions for each answer.

    name: what to call the player in sample files; default: the model. api_key_env: environment
    variable with the key. timeout_s: of one request. retries: how often a request is sent again
    after 429, 5xx, a lost connection or a timeout, `backoff_s` later and then twice that, and so
    on, or when the endpoint says. max_in_flight: requests at one time, those that pause included.

    Raises ConfigError for settings that the protocol has no words for, or without a key in
    `api_key_env`.
    """

    def __init__(
        self,
        url: str,
        model: str,
        sampling: Sampling,
        *,
        name: str | None = None,
        api_key_env: str | None = None,
        timeout_s: float = 120.0,
        max_in_flight: int = 32,
        retries: int = 5,
        backoff_s: float = 0.5,
    ) -> None:
        _refuse_unspeakable(sampling)
        self.policy = name or model
        self.url = f"{url.rstrip('/')}/chat/completions"
        self._model = model
        self._sampling = sampling
        self._headers = _headers(api_key_env)
        self._timeout_s = timeout_s
        self._max_in_flight = max_in_flight
        self._retries = retries
        self._backoff_s = backoff_s
        self._client: httpx2.AsyncClient | None = None
        self._slots = asyncio.Semaphore(max_in_flight)

    def actor(
        self,
        role: str,
        draw: Draw,
        *,
        episode: int,
        seed: Callable[[int], int],
        cut: CutSignal | None = None,
    ) -> EndpointActor:
        return EndpointActor(role, self, draw, episode=episode, seed=seed, cut=cut)

    async def ask(self, messages: Sequence[Message], seed: int) -> Reply:
        """One answer. Raises EngineError, with the address and what came back, if there is none."""
        sampling = self._sampling
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [dict(message) for message in messages],
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "seed": seed % MAX_SEED,
        }
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        async with self._slots:  # ends: each holder after `retries` requests of `timeout_s`
            for attempt in range(self._retries + 1):
                answer, problem, pause_s = await self._post(body)
                if answer is not None:
                    return self._read(answer)
                if pause_s is None:
                    raise EngineError(f"{self.url} {problem}")
                if attempt < self._retries:
                    await asyncio.sleep(
                        min(max(pause_s, self._backoff_s * 2**attempt), MAX_BACKOFF_S)
                    )
        raise EngineError(f"{self.url} {problem}; gave up after {self._retries + 1} tries")

    async def aclose(self) -> None:
        """Close the connections. Idempotent; a later request opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _post(self, body: dict[str, Any]) -> tuple[str | None, str, float | None]:
        """(answer, what went wrong, shortest pause before another try); None: no other try."""
        if self._client is None:
            limits = httpx2.Limits(max_connections=self._max_in_flight)
            self._client = httpx2.AsyncClient(headers=self._headers, limits=limits, timeout=None)
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.post(self.url, json=body)
        except TimeoutError:
            return None, f"did not answer within {self._timeout_s:g} s", 0.0
        except httpx2.TransportError as error:
            return None, f"can not be reached ({type(error).__name__}: {error})", 0.0
        if response.is_success:
            return response.text, "", None
        complaint = " ".join(response.text.split())[:SHOWN]
        problem = f"answered {response.status_code} {response.reason_phrase}: {complaint}"
        is_passing = response.status_code == 429 or response.status_code >= 500
        return None, problem, _retry_after(response) if is_passing else None

    def _read(self, text: str) -> Reply:
        try:
            document = json.loads(text)
            choice = document["choices"][0]
            content = choice["message"]["content"] or ""
            finish = "length" if choice.get("finish_reason") == "length" else "stop"
            num_tokens = int((document.get("usage") or {}).get("completion_tokens") or 0)
            return Reply(str(content), finish, num_tokens)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise EngineError(
                f"{self.url} gave no chat completion ({type(error).__name__}: {error}): "
                f"{' '.join(text.split())[:SHOWN]}"
            ) from None


class EndpointActor:
    """The `env.Actor` of one role in one episode."""

    fatal: Exception | None = None
    abort: str | None = None

    def __init__(
        self,
        role: str,
        seat: EndpointSeat,
        draw: Draw,
        *,
        episode: int,
        seed: Callable[[int], int],
        cut: CutSignal | None = None,
    ) -> None:
        self.role = role
        self.refusal: EngineError | None = None
        self._seat = seat
        self._draw = draw
        self._episode = episode
        self._seed = seed
        self._cut = cut
        self._num_calls = 0
        self._replies: list[Reply] = []

    async def __call__(self, context: Prompt | str | Sequence[Message]) -> Reply:
        messages = _as_messages(context)
        seed = self._seed(self._num_calls)
        self._num_calls += 1
        try:
            reply = await self._ask(messages, seed)
        except EngineError as error:
            self.refusal = error
            raise
        self._replies.append(reply)
        return reply

    def answers(self) -> list[Sample]:
        """One sample for each answer, in order, with its text and without tokens."""
        return [
            Sample(
                policy=self._seat.policy,
                prompt_id=self._draw.prompt.id,
                episode=self._episode,
                tokens=[],
                mask=[],
                logprobs=[],
                versions=[],
                status=Status.TRUNCATED if reply.finish == "length" else Status.COMPLETED,
                role=self.role,
                row=index,
                text=reply.text,
                finish=reply.finish,
            )
            for index, reply in enumerate(self._replies)
        ]

    async def _ask(self, messages: Sequence[Message], seed: int) -> Reply:
        """The answer; an empty one if it was cut: what an endpoint has so far is not known."""
        cut = self._cut
        if cut is not None and cut.is_set:
            return Reply("", "length", 0)
        asking = asyncio.ensure_future(self._seat.ask(messages, seed))
        with nullcontext() if cut is None else cut.listening(asking.cancel):
            try:
                return await asking  # ends: by the seat's time limit and number of tries
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if cut is None or not cut.is_set or (task is not None and task.cancelling()):
                    raise
                return Reply("", "length", 0)


def _as_messages(context: Prompt | str | Sequence[Message]) -> Sequence[Message]:
    if isinstance(context, Prompt):
        context = context.messages if context.messages is not None else context.text or ""
    return [Message(role="user", content=context)] if isinstance(context, str) else context


def _headers(api_key_env: str | None) -> dict[str, str]:
    if api_key_env is None:
        return {}
    key = os.environ.get(api_key_env, "").strip()
    if not key:
        raise ConfigError(f"the environment variable {api_key_env} holds no key: set it")
    return {"Authorization": f"Bearer {key}"}


def _refuse_unspeakable(sampling: Sampling) -> None:
    unknown = ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos")
    for key in unknown:
        value = getattr(sampling, key)
        if value != type(sampling).model_fields[key].default:
            raise ConfigError(
                f"{key} = {value!r} can not be asked of an OpenAI-compatible endpoint: leave it out"
            )


def _retry_after(response: httpx2.Response) -> float:
    """Seconds that the endpoint asks to wait; 0 if it does not say, or says a date."""
    try:
        return max(0.0, float(response.headers.get("retry-after", 0)))
    except ValueError:
        return 0.0
