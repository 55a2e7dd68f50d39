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

import numpy as np

from paceline.deadline import reason_of, stop
from paceline.errors import ConfigError, EngineError, TrainerError
from paceline.teachers.http import (
    BadAnswerError,
    HttpStatusError,
    NoConnectionError,
    request_json,
)
from paceline.teachers.vocabulary import check_texts, probe_tokens
from paceline.trainers.base import Place
from paceline.types import JsonValue, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from paceline.types import FloatArray

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
"""Before the first repetition; doubled for each further one."""
INFORMATION = ("/get_model_info", "/model_info")


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
        tokens = probe_tokens(tokenizer)
        try:
            answer = await self._request("/generate", self._question(tokens, shows_text=True))
        except HttpStatusError as error:
            raise ConfigError(
                f"{self._named}: it refuses a text of the policy's tokens 0 to {tokens[-1]} "
                f"({error}); a teacher must share the policy's vocabulary and return log-probs of "
                "its input"
            ) from error
        entries = self._entries(answer, "input_token_logprobs", tokens)
        texts = [entry[2] for entry in entries if len(entry) > 2 and isinstance(entry[2], str)]
        if len(texts) == len(tokens):
            check_texts(tokenizer, tokens, texts, self._named)
        else:
            logger.warning("%s names no texts of tokens: vocabularies are not compared", self._url)

    async def grade(self, rows: list[Row]) -> None:
        """Grade the rows, some at the same time. The first failure ends all: EngineError."""
        if hot := next((row for row in rows if row.temperature != 1), None):
            raise TrainerError(
                f"{self._named}: a server scores at temperature 1 only, and a row was sampled at "
                f"{hot.temperature:g}; load the teacher (teacher.model.path) instead"
            )
        free = asyncio.Semaphore(self._max_in_flight)

        async def grade(row: Row) -> None:
            async with free:  # ends: with a request before it, which has its time limits
                await self._grade(row)

        tasks = [asyncio.ensure_future(grade(row)) for row in rows]
        try:
            await asyncio.gather(*tasks)  # ends: each by its time limits
        except (HttpStatusError, BadAnswerError) as error:
            raise EngineError(f"{self._named} can not grade an answer: {error}") from error
        finally:
            await stop(*tasks)

    async def place(self, where: Place) -> None:
        """Nothing of it is here."""

    async def aclose(self) -> None:
        """Nothing is held between two calls."""

    @property
    def _named(self) -> str:
        return f"teacher.url = {self._url!r}"

    def _question(self, tokens: list[int], *, shows_text: bool = False) -> dict[str, Any]:
        question: dict[str, Any] = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        if self._top_k:
            question["top_logprobs_num"] = self._top_k
        if shows_text:
            question["return_text_in_logprobs"] = True
        return question

    async def _grade(self, row: Row) -> None:
        """Ask for the row up to its last trained token."""
        trained = np.flatnonzero(row.mask_T)
        kind = row.weights_T.dtype
        logprobs_T = np.zeros(len(row.tokens_T), kind)
        ids_TK = np.zeros((len(row.tokens_T), self._top_k), np.int32)
        top_TK = np.zeros((len(row.tokens_T), self._top_k), kind)
        if len(trained):
            tokens: list[int] = row.tokens_T[: trained[-1] + 1].tolist()
            answer = await self._request("/generate", self._question(tokens))
            entries = self._entries(answer, "input_token_logprobs", tokens)
            logprobs_T[trained] = [_number(entries[t][0]) for t in trained]
            if self._top_k:
                lists = self._entries(answer, "input_top_logprobs", tokens)
                for t in trained:
                    ids_TK[t], top_TK[t] = self._likely(lists[t], int(t))
        row.teacher_logprobs_T = logprobs_T
        if self._top_k:
            row.teacher_ids_TK, row.teacher_top_logprobs_TK = ids_TK, top_TK

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
                if entry[1] != token:
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
            except HttpStatusError:
                continue
            except BadAnswerError as error:
                raise EngineError(f"{self._named}: {error}") from error
            if isinstance(found, dict):
                return found
        return {}

    async def _request(self, path: str, body: Any = None) -> Any:
        """Repeated after failures that may pass. Raises EngineError when they do not."""
        pause_s = self._first_pause_s
        for attempt in range(self._retries + 1):
            try:
                return await request_json(self._url + path, body, timeout_s=self._timeout_s)
            except (TimeoutError, NoConnectionError, HttpStatusError) as error:
                if isinstance(error, HttpStatusError) and error.status < 500:
                    raise
                if attempt == self._retries:
                    raise EngineError(self._gave_up(path, error)) from error
                logger.warning("%s%s: %s; trying again", self._url, path, reason_of(error))
                await asyncio.sleep(pause_s)
                pause_s *= 2
        raise AssertionError("unreachable")

    def _gave_up(self, path: str, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            what = f"no answer to {path} within {self._timeout_s:g} s (teacher.timeout_s)"
        elif isinstance(error, NoConnectionError):
            what = f"can not be reached ({error})"
        else:
            what = f"fails at {path} with {error}"
        return (
            f"{self._named}: {what}, {self._retries + 1} times in a row (teacher.retries): start "
            "the server, or correct the url"
        )


def _number(found: Any) -> float:
    return math.nan if found is None else float(found)
