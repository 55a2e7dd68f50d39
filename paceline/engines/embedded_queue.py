"""Requests on their way: what is let in, and what waits for a slot, in order of arrival."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.engines.base import Completion, Finish, Request
from paceline.engines.embedded_sampler import IntArray
from paceline.errors import EngineError


@dataclass(slots=True, eq=False)
class Generation:
    """One request on its way through the engine, with what was made of it so far."""

    request: Request
    prompt: IntArray
    limit: int
    """Most new tokens: `max_tokens`, or what the context leaves."""
    end_ids: frozenset[int]
    stop: tuple[str, ...]
    future: asyncio.Future[Completion]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Finish | None = None
    matched: str | int | None = None
    """The stop text or end token that ended it."""
    cause: str | None = None
    error: str | None = None
    """Set if it failed alone, without the engine."""
    is_cancelled: bool = False
    is_cut: bool = False
    """To be ended at the next step boundary, with the tokens it has."""
    prompt_key: bytes = b""
    """Content of the prompt; equal prompts are computed once."""
    stop_window: int = 0
    """Tokens at the answer's end that can hold a stop text that ends now."""
    before: list[int] = field(default_factory=list)
    """The end of what was sampled of the answer by an earlier request."""

    def __post_init__(self) -> None:
        self.prompt_key = self.prompt.tobytes()
        if self.stop:
            # Every token but empty ones is a byte at least; a few more for a split first character.
            self.stop_window = max(len(s.encode()) for s in self.stop) + 4
            first = max(len(self.prompt) - self.request.num_sampled, 0)
            self.before = self.prompt[first:].tolist()[-self.stop_window :]

    def context(self) -> IntArray:
        """The tokens whose keys and values a slot holds: all but the newest."""
        return np.concatenate((self.prompt, np.array(self.tokens[:-1], np.int64)))

    def completion(self) -> Completion:
        assert self.finish is not None
        return Completion(
            self.tokens, self.logprobs, self.versions, self.finish, self.matched, self.cause,
            can_go_on=self.finish == "abort",
        )  # fmt: skip


class WaitingQueue:
    """First come, first served. Leaving early costs nothing."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[Generation, None] = OrderedDict()
        self._prompts: OrderedDict[bytes, list[Generation]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: Generation) -> bool:
        return sequence in self._sequences

    def push(self, sequence: Generation) -> None:
        self._sequences[sequence] = None
        self._prompts.setdefault(sequence.prompt_key, []).append(sequence)

    def pop(self) -> Generation:
        sequence, _ = self._sequences.popitem(last=False)
        self._forget(sequence)
        return sequence

    def remove(self, sequence: Generation) -> None:
        del self._sequences[sequence]
        self._forget(sequence)

    def _forget(self, sequence: Generation) -> None:
        same = self._prompts[sequence.prompt_key]
        same.remove(sequence)
        if not same:
            del self._prompts[sequence.prompt_key]

    def wants(self, prompt_key: bytes) -> bool:
        """True if a waiting sequence has this prompt."""
        return prompt_key in self._prompts

    def sort(self) -> None:
        """Order by group and seed, where the order of arrival is left to chance."""
        ordered = sorted(self._sequences, key=lambda g: (g.request.group, g.request.seed))
        for sequence in ordered:
            self._sequences.move_to_end(sequence)
            self._prompts.move_to_end(sequence.prompt_key)

    def prompts(self, max_tokens: int) -> dict[bytes, IntArray]:
        """Distinct prompts by first arrival, as many as fit in `max_tokens` together."""
        found: dict[bytes, IntArray] = {}
        for key, (first, *_) in self._prompts.items():
            max_tokens -= len(first.prompt)
            if max_tokens < 0:
                break
            found[key] = first.prompt
        return found

    def drain(self) -> Iterator[Generation]:
        while self._sequences:
            yield self.pop()


@dataclass(slots=True)
class Intake:
    """Turns requests into generations, or says what is wrong with them."""

    vocab_size: int
    max_context: int | None
    """Most tokens of prompt plus answer; None: no limit."""
    eos_token_ids: frozenset[int]
    has_tokenizer: bool
    _checked: tuple[list[int], IntArray] = ([], np.zeros(0, np.int64))
    """The newest prompt: requests of one group bring equal ones in turn."""

    def generation(self, request: Request, future: asyncio.Future[Completion]) -> Generation:
        """Check a request; its `limit` is below 1 if the prompt leaves no room for a token."""
        prompt = self.checked(request.tokens, "prompt")
        sampling = request.sampling
        if sampling.stop and not self.has_tokenizer:
            raise EngineError("stop texts need a tokenizer, and this engine was made without one")
        room = sampling.max_tokens - request.num_sampled
        if self.max_context is not None:
            room = min(room, self.max_context - len(prompt))
        end_ids = self.eos_token_ids | frozenset(sampling.stop_token_ids)
        return Generation(
            request,
            prompt,
            limit=room,
            end_ids=frozenset() if sampling.ignore_eos else end_ids,
            stop=() if sampling.ignore_eos else sampling.stop,
            future=future,
        )

    def checked(self, tokens: Sequence[int], what: str) -> IntArray:
        """Token ids as an array, or EngineError: empty, unknown to the model, or too long.

        The array may be that of others with equal tokens.
        """
        if isinstance(tokens, list) and tokens and tokens == self._checked[0]:
            return self._checked[1]
        if len(tokens) == 0:
            raise EngineError(f"the {what} is empty: a model needs one token to go on from")
        array = np.asarray(tokens)
        if array.dtype.kind not in "iu" or array.ndim != 1:
            raise EngineError(f"the {what} is not a flat list of token ids, but {array.dtype}")
        if array.min() < 0 or array.max() >= self.vocab_size:
            raise EngineError(
                f"the {what} has token ids from {array.min()} to {array.max()}, and the model "
                f"knows 0 to {self.vocab_size - 1}: is the tokenizer another model's?"
            )
        if self.max_context is not None and len(array) > self.max_context:
            raise EngineError(
                f"the {what} has {len(array)} tokens, and the context holds {self.max_context}: "
                "shorten it, filter it out, or raise `engine.max_context` as far as the model "
                "allows"
            )
        self._checked = (list(tokens), array.astype(np.int64))
        return self._checked[1]
