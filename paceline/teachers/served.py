"""A teacher on a server that speaks SGLang's native HTTP API: it is attached to, never started.

    POST /generate {"input_ids": [...], "sampling_params": {"max_new_tokens": 0, "temperature": 0},
                    "return_logprob": true, "logprob_start_len": 0, "top_logprobs_num": K}
    answers {"meta_info": {"input_token_logprobs": [[logprob, id, text], ...],
                           "input_top_logprobs": [null, [[logprob, id, text], ... K], ...]}}

with one entry for each token of the input; that of the first token has no log-prob. Log-probs of
input tokens are those before temperature, so only rows at temperature 1 can be graded.

A log-prob that is no finite number comes as null. It becomes NaN, which the loss counts, and which
skips the optimizer step.

Legend: T tokens of a row, K tokens that the teacher finds most likely.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Any

import httpx2
import numpy as np

from paceline.deadline import stop
from paceline.errors import ConfigError, EngineError, TrainerError
from paceline.teachers.vocabulary import check_texts, probe_tokens
from paceline.trainers.base import Place
from paceline.types import JsonValue, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from paceline.types import FloatArray, IntArray

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
"""Before the first repetition; doubled for each further one."""
INFORMATION = ("/model_info", "/get_model_info")
CLIPPED = 0
"""What SGLang calls the last token of a vocabulary in an answer; the log-prob is the right one."""
PROBE = "1 + 1 = 2"
"""A text that is scored when a teacher is opened, to see that it can."""
SHOWN = 300
"""Characters of a server's complaint that are passed on."""


class _RefusedError(EngineError):
    """The server will never answer this request: 4xx."""


class ServedTeacher:
    """Implements `paceline.teachers.base.Teacher`. `open` before use."""

    def __init__(
        self,
        url: str,
        *,
        top_k: int,
        vocab: int,
        max_in_flight: int = 32,
        timeout_s: float = 120.0,
        retries: int = 3,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """top_k: most likely tokens to name. vocab: tokens that the policy's model knows."""
        self._url = url
        self._top_k, self._vocab = top_k, vocab
        self._max_in_flight = max_in_flight
        self._timeout_s, self._retries, self._first_pause_s = timeout_s, retries, first_pause_s
        self._identity: dict[str, JsonValue] = {"url": url}
        self._client: httpx2.AsyncClient | None = None
        self._num_tokens: int | None = None

    @property
    def identity(self) -> dict[str, JsonValue]:
        """The model that the server says it holds; its url if it does not say."""
        return self._identity

    async def open(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Ask what model this is, and whether it means by tokens what the policy means.

        Raises EngineError if the server can not be reached, ConfigError if it is no teacher for
        this policy.
        """
        if self._top_k > self._vocab:
            raise ConfigError(
                f"algorithm.top_k = {self._top_k}, but the policy knows {self._vocab} tokens: "
                f"write {self._vocab} or less"
            )
        information = await self._information()
        if model := information.get("model_path"):
            self._identity = {"model": model}
        await self._compare_texts(tokenizer)
        self._num_tokens = len(tokenizer)
        tokens = tokenizer.encode(PROBE, add_special_tokens=False)
        try:
            answer = await self._request("/generate", self._question(tokens))
        except _RefusedError as error:
            raise ConfigError(
                f"{error}. A teacher must give log-probs of its input: start the server without "
                "options that forbid them"
            ) from error
        self._read(answer, tokens, list(range(1, len(tokens))))

    async def _compare_texts(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Asked without touching the model: a token that it lacks would end some servers."""
        tokens = probe_tokens(tokenizer)
        asked = {"tokens": [[token] for token in tokens], "skip_special_tokens": False}
        try:
            texts = (await self._request("/detokenize", asked))["text"]
        except (_RefusedError, KeyError, TypeError):
            texts = None
        if not isinstance(texts, list) or len(texts) != len(tokens):
            logger.warning("%s shows no texts of tokens: vocabularies are not compared", self._url)
            return
        check_texts(tokenizer, tokens, texts, self._named)

    async def grade(self, rows: list[Row]) -> None:
        """Grade the rows, some at the same time. The first failure ends all: EngineError."""
        if hot := next((row for row in rows if row.temperature != 1), None):
            raise TrainerError(
                f"{self._named}: a server scores at temperature 1 only, and a row was sampled at "
                f"{hot.temperature:g}; load the teacher (teacher.model.path) instead"
            )
        highest = max((int(row.tokens_T.max()) for row in rows), default=0)
        if self._num_tokens is not None and highest >= self._num_tokens:
            raise TrainerError(
                f"{self._named}: an answer holds the token {highest}, and the tokenizer has "
                f"{self._num_tokens}: the server is not asked, since it may not know the token"
            )
        free = asyncio.Semaphore(self._max_in_flight)

        async def grade(row: Row) -> None:
            async with free:  # ends: with a request before it, which has its time limits
                await self._grade(row)

        tasks = [asyncio.ensure_future(grade(row)) for row in rows]
        try:
            await asyncio.gather(*tasks)  # ends: each by its time limits
        finally:
            await stop(*tasks)

    async def place(self, where: Place) -> None:
        """Nothing of it is here."""

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    @property
    def _named(self) -> str:
        return f"teacher.url = {self._url!r}"

    def _question(self, tokens: list[int]) -> dict[str, Any]:
        question: dict[str, Any] = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        if self._top_k:
            question["top_logprobs_num"] = self._top_k
        return question

    async def _grade(self, row: Row) -> None:
        """Ask for the row up to its last trained token."""
        trained: list[int] = np.flatnonzero(row.mask_T).tolist()
        length, kind = len(row.tokens_T), row.weights_T.dtype
        logprobs_T = np.zeros(length, kind)
        ids_TK = np.zeros((length, self._top_k), np.int32)
        top_TK = np.zeros((length, self._top_k), kind)
        if trained:
            tokens: list[int] = row.tokens_T[: trained[-1] + 1].tolist()
            answer = await self._request("/generate", self._question(tokens))
            logprobs_T[trained], ids_TK[trained], top_TK[trained] = self._read(
                answer, tokens, trained
            )
        row.teacher_logprobs_T = logprobs_T
        if self._top_k:
            row.teacher_ids_TK, row.teacher_top_logprobs_TK = ids_TK, top_TK

    def _read(
        self, answer: Any, tokens: list[int], trained: list[int]
    ) -> tuple[list[float], IntArray, FloatArray]:
        """Log-probs of the trained ones among the tokens; likely tokens at their places."""
        entries = self._entries(answer, "input_token_logprobs", tokens)
        ids_NK = np.zeros((len(trained), self._top_k), np.int32)
        top_NK = np.zeros((len(trained), self._top_k))
        if self._top_k:
            lists = self._entries(answer, "input_top_logprobs", tokens)
            for n, t in enumerate(trained):
                ids_NK[n], top_NK[n] = self._likely(lists[t], t)
        return [_number(entries[t][0]) for t in trained], ids_NK, top_NK

    def _likely(self, found: Any, t: int) -> tuple[list[int], FloatArray]:
        """The tokens at one position, and their log-probs."""
        if not isinstance(found, list) or len(found) != self._top_k:
            count = len(found) if isinstance(found, list) else 0
            raise EngineError(
                f"{self._named} named {count} likely tokens at position {t}, asked for "
                f"{self._top_k} (algorithm.top_k)"
            )
        ids = [int(entry[1]) for entry in found]
        if max(ids) >= self._vocab:
            raise EngineError(
                f"{self._named} finds token {max(ids)} likely at position {t}, which the policy's "
                f"model, of {self._vocab} tokens, does not know"
            )
        return ids, np.array([_number(entry[0]) for entry in found])

    def _entries(self, answer: Any, name: str, tokens: list[int]) -> list[Any]:
        """One entry a token, and of that very token where the server says which."""
        try:
            entries: list[Any] = answer["meta_info"][name]
            count = len(entries)
        except (KeyError, TypeError) as error:
            raise EngineError(
                f"{self._named} answered without meta_info.{name}: it must speak SGLang's native "
                "HTTP API (POST /generate)"
            ) from error
        if count != len(tokens):
            raise EngineError(
                f"{self._named} answered with {count} entries in {name} to {len(tokens)} tokens"
            )
        if name == "input_token_logprobs":
            for t, (entry, token) in enumerate(zip(entries, tokens, strict=True)):
                if entry[1] not in (token, CLIPPED):
                    raise EngineError(
                        f"{self._named} scored token {entry[1]} at position {t}, where the answer "
                        f"has {token}"
                    )
        return entries

    async def _information(self) -> dict[str, Any]:
        """What the server tells of its model; nothing if it has no such page."""
        for path in INFORMATION:
            try:
                found = await self._request(path)
            except _RefusedError:
                continue
            if isinstance(found, dict):
                return found
        return {}

    async def _request(self, path: str, body: Any = None) -> Any:
        """The JSON that answers it, repeated after failures that may pass.

        Raises EngineError when they do not.
        """
        problem, pause_s = "", self._first_pause_s
        for attempt in range(self._retries + 1):
            response, problem = await self._ask(path, body)
            if response is not None:
                return self._content(path, response)
            if attempt < self._retries:
                logger.warning("%s %s; trying again", self._named, problem)
                await asyncio.sleep(pause_s)
                pause_s *= 2
        times = f", {self._retries + 1} times in a row (teacher.retries)"
        raise EngineError(f"{self._named} {problem}{times}: start the server, or correct the url")

    async def _ask(self, path: str, body: Any) -> tuple[httpx2.Response | None, str]:
        """The response, or what went wrong this time."""
        if self._client is None:
            limits = httpx2.Limits(max_connections=self._max_in_flight)
            self._client = httpx2.AsyncClient(limits=limits, timeout=None)
        method = "GET" if body is None else "POST"
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.request(method, self._url + path, json=body)
        except TimeoutError:
            limit = f"{self._timeout_s:g} s (teacher.timeout_s)"
            return None, f"did not answer {path} within {limit}"
        except httpx2.TransportError as error:
            return None, f"can not be reached ({type(error).__name__}: {error})"
        if response.status_code < 500 and response.status_code != 429:
            return response, ""
        return None, f"answered {path} with {_complaint(response)}"

    def _content(self, path: str, response: httpx2.Response) -> Any:
        if not response.is_success:
            raise _RefusedError(f"{self._named} answered {path} with {_complaint(response)}")
        try:
            return response.json()
        except ValueError as error:
            raise EngineError(f"{self._named} answered {path} with no JSON: {error}") from error


def _complaint(response: httpx2.Response) -> str:
    text = " ".join(response.text.split())[:SHOWN]
    return f"status {response.status_code}" + (f": {text}" if text else "")


def _number(found: Any) -> float:
    return math.nan if found is None else float(found)
