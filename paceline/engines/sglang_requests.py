"""Answers asked of SGLang at one url: a server's, or that of a router before several."""

from __future__ import annotations

from typing import Any

from paceline.engines.answers import settle
from paceline.engines.base import Completion, CutSignal, Request
from paceline.engines.http import JsonClient, RefusedError
from paceline.engines.open_requests import OpenRequests
from paceline.engines.served import Served
from paceline.engines.sglang_answers import completion, sampling_params
from paceline.errors import EngineError


class SGLangRequests:
    """Of one event loop."""

    def __init__(self, client: JsonClient, served: Served, open: OpenRequests) -> None:
        """open: what is asked is counted there, and ended through it."""
        self._client, self._served, self._open = client, served, open

    async def answer(
        self, url: str, request: Request, *, longest_prompt: int, version: int, salt: str | None
    ) -> Completion:
        """version: of tokens for which the server names none. salt: keeps prefixes apart.

        Raises as `paceline.engines.replica.Replica.generate` does.
        """
        limit = self._served.room(request, longest_prompt)
        if limit < 1 or (request.cut is not None and request.cut.is_set):
            return Completion([], [], [], "length")
        sampling = request.sampling
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
        answer, is_ended = await self.post(url, body, salt, request.cut)
        made = completion(answer, version=version)
        settle(made, request, self._served.tokenizer, is_ended=is_ended)
        return made

    async def post(
        self, url: str, body: dict[str, Any], salt: str | None, cut: CutSignal | None = None
    ) -> tuple[Any, bool]:
        """The answer, and whether a pause ended it. However the wait ends, nothing goes on at the
        server."""
        rid = self._open.new_id()
        body |= {"rid": rid, "return_logprob": True, "stream": False}
        if salt is not None:
            body["extra_key"] = salt
        answer = self._client.request(
            url, "/generate", body, timeout_s=self._served.request_timeout_s
        )
        try:
            return await self._open.run(rid, cut, answer)
        except RefusedError as error:
            raise EngineError(f"{url} refused a request: {error.text}") from None
