"""One role of an episode: turns messages into requests, and answers into columns of a sample.

The ids that the policy sampled stay as they are. A conversation that goes on from a former answer
reuses its ids, and only what was added is encoded; one that does not, or whose template rewrites
old turns, begins a new row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.engines.base import Completion, CutSignal, Engine, Progress, Request, Sampling
from paceline.errors import EngineError, RolloutError
from paceline.rollout.env import Reply
from paceline.rollout.renderer import Renderer
from paceline.types import NO_VERSION, Draw, Message, Prompt, Sample, Status

Conversation = tuple[Message, ...] | str
"""What was said, as chat messages or as one plain text."""


@dataclass(frozen=True, slots=True)
class Seat:
    """What a role is played with: an engine and how it is asked."""

    policy: str
    engine: Engine
    renderer: Renderer
    sampling: Sampling
    learns: bool = True
    """False for a frozen policy: what it says is kept apart and never trained on."""
    label: str = ""
    """Which of several players of the role it is."""

    def actor(
        self,
        role: str,
        draw: Draw,
        *,
        episode: int,
        seed: Callable[[int], int],
        cut: CutSignal | None = None,
    ) -> RecordingActor:
        """Speaks for the role in one episode."""
        return RecordingActor(role, self, draw, episode=episode, seed=seed, cut=cut)


@dataclass(slots=True)
class Row:
    """One token sequence under construction. The columns have one length."""

    tokens: list[int]
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    said: Conversation = ()
    """The conversation up to and with the last answer."""
    answer_start: int = 0
    """Where the first answer begins."""
    finish: str = ""
    cause: str | None = None
    is_busy: bool = False
    interruptions: int = 0

    def __post_init__(self) -> None:
        self.answer_start = len(self.tokens)
        self._pad()

    def append_context(self, ids: Sequence[int]) -> None:
        """Tokens that the policy did not choose."""
        self.tokens += ids
        self._pad()

    def append_answer(self, completion: Completion) -> None:
        """Tokens that the policy chose. Raises RolloutError if the engine's columns differ."""
        count = len(completion.tokens)
        if len(completion.logprobs) != count or len(completion.versions) != count:
            raise RolloutError(
                f"the engine returned {count} tokens, {len(completion.logprobs)} log-probs and "
                f"{len(completion.versions)} versions for one answer"
            )
        self.tokens += completion.tokens
        self.mask += [True] * count
        self.logprobs += completion.logprobs
        self.versions += completion.versions
        self.finish = completion.finish
        if completion.finish == "abort":
            self.cause = completion.cause or "the engine ended it early"

    def _pad(self) -> None:
        missing = len(self.tokens) - len(self.mask)
        self.mask += [False] * missing
        self.logprobs += [0.0] * missing
        self.versions += [NO_VERSION] * missing


class RecordingActor:
    """The `env.Actor` of one role in one episode.

    seed: number of an answer in the episode, from 0 -> the seed of its request. cut: ends the
    answers of the episode early; those that follow are empty.
    """

    def __init__(
        self,
        role: str,
        seat: Seat,
        draw: Draw,
        *,
        episode: int,
        seed: Callable[[int], int],
        cut: CutSignal | None = None,
    ) -> None:
        self.role = role
        self.seat = seat
        self.rows: list[Row] = []
        self.refusal: EngineError | None = None
        """The engine could not serve a request of this episode."""
        self.fatal: Exception | None = None
        """The engine broke: nothing can be collected from it any more."""
        self._draw = draw
        self._episode = episode
        self._seed = seed
        self._cut = cut
        self._num_calls = 0
        self._progress = Progress()

    @property
    def num_sampled(self) -> int:
        """Tokens that were made for the role so far, also those of answers under way."""
        return self._progress.num_tokens

    @property
    def learns(self) -> bool:
        return self.seat.learns

    @property
    def abort(self) -> str | None:
        """Why the engine ended an answer of the episode, if it did."""
        return next((row.cause for row in self.rows if row.finish == "abort"), None)

    async def __call__(self, context: Prompt | str | Sequence[Message]) -> Reply:
        seed = self._seed(self._num_calls)
        self._num_calls += 1
        row = self._row_for(context)
        row.is_busy = True
        try:
            completion = await self._answer(row, seed)
        except EngineError as exc:
            if isinstance(exc.__cause__, Exception):
                self.fatal = exc.__cause__
            else:
                self.refusal = exc
            raise
        except Exception as exc:
            self.fatal = exc
            raise
        row.append_answer(completion)
        row.is_busy = False
        reply = self._reply(completion)
        row.said = _with_reply(_conversation(context), reply.text)
        return reply

    async def _answer(self, row: Row, seed: int) -> Completion:
        """The whole answer. Where a publish ends it early, the rest is asked for: the tokens so
        far stay, with their log-probs and versions, and new weights go on from them."""
        answer: Completion | None = None
        while self._cut is None or not self._cut.is_set:
            so_far = [] if answer is None else answer.tokens
            request = Request(
                tokens=row.tokens + so_far,
                sampling=self.seat.sampling,
                seed=seed,
                group=f"{self.seat.policy}/{self._draw.ordinal}",
                cut=self._cut,
                num_sampled=len(so_far),
                progress=self._progress,
            )
            part = await self.seat.engine.generate(request)
            if answer is not None:
                part.tokens = answer.tokens + part.tokens
                part.logprobs = answer.logprobs + part.logprobs
                part.versions = answer.versions + part.versions
            if not part.can_go_on:
                return part
            row.interruptions += 1
            answer = part
        answer = answer or Completion([], [], [], "length")
        answer.finish, answer.cause = "length", None
        return answer

    def samples(self) -> list[Sample]:
        """One sample a row; one with only the prompt if nothing was said. Not scored yet."""
        rows = self.rows or [Row(self.seat.renderer.encode(self._draw.prompt))]
        return [self._sample(index, row) for index, row in enumerate(rows)]

    def answers(self) -> list[Sample]:
        """One sample for each row that holds an answer. Not scored yet."""
        rows = [row for row in self.rows if row.finish]
        return [self._sample(index, row) for index, row in enumerate(rows)]

    def blank(self) -> Sample:
        """A sample without a token, for what befell an episode in which the role was silent."""
        return self._sample(0, Row([]))

    def _sample(self, index: int, row: Row) -> Sample:
        is_aborted = row.finish == "abort"
        status = Status.TRUNCATED if row.finish == "length" else Status.COMPLETED
        return Sample(
            policy=self.seat.policy,
            prompt_id=self._draw.prompt.id,
            episode=self._episode,
            tokens=row.tokens,
            mask=row.mask,
            logprobs=row.logprobs,
            versions=row.versions,
            status=Status.ABORTED if is_aborted else status,
            temperature=self.seat.sampling.temperature,
            role=self.role,
            row=index,
            text=self.seat.renderer.decode(row.tokens[row.answer_start :]),
            finish=row.finish,
            cause="engine/abort" if is_aborted else None,
            detail=row.cause or "",
            label=self.seat.label,
            interruptions=row.interruptions,
        )

    def _row_for(self, context: Prompt | str | Sequence[Message]) -> Row:
        """The row that the answer is appended to, its context complete."""
        said = _conversation(context)
        for row in reversed(self.rows):
            added = self._addition(row, said)
            if added is not None:
                row.append_context(added)
                return row
        renderer = self.seat.renderer
        if isinstance(context, Prompt):
            ids = renderer.encode(context)
        elif isinstance(said, str):
            ids = renderer.encode_text(said)
        else:
            ids = renderer.encode_messages(said)
        if not ids:
            raise ValueError("the context to be answered has no tokens")
        self.rows.append(Row(ids))
        return self.rows[-1]

    def _addition(self, row: Row, said: Conversation) -> list[int] | None:
        """Ids that bring the row to where the conversation is now; None if it is another one."""
        known, renderer = row.said, self.seat.renderer
        if row.is_busy or not known:
            return None
        if isinstance(said, str) or isinstance(known, str):
            both = isinstance(said, str) and isinstance(known, str)
            goes_on = both and len(said) > len(known) and said[: len(known)] == known
            return renderer.extend_text(str(said[len(known) :])) if goes_on else None
        if len(said) <= len(known) or said[: len(known)] != known:
            return None
        return renderer.extend(row.tokens, said[len(known) :], row.finish == "stop")

    def _reply(self, completion: Completion) -> Reply:
        is_token = isinstance(completion.stop, int)
        text = self.seat.renderer.decode(completion.tokens[: -1 if is_token else None])
        if isinstance(completion.stop, str):
            text = text.partition(completion.stop)[0]
        return Reply(text, completion.finish, len(completion.tokens))


def _conversation(context: Prompt | str | Sequence[Message]) -> Conversation:
    if isinstance(context, Prompt):
        return context.text or "" if context.messages is None else tuple(context.messages)
    return context if isinstance(context, str) else _messages(context)


def _messages(context: Any) -> tuple[Message, ...]:
    if not isinstance(context, Sequence):
        kind = type(context).__name__
        raise TypeError(f"an actor answers a Prompt, a text or a list of messages, not a {kind}")
    for message in context:
        if not isinstance(message, Mapping) or "role" not in message:
            raise TypeError(f"not a message with a role and a content: {message!r:.80}")
    return tuple(context)


def _with_reply(said: Conversation, text: str) -> Conversation:
    if isinstance(said, str):
        return said + text
    return (*said, Message(role="assistant", content=text))
