"""What the rollout tests play with: a scripted engine, rewards in place, a stream of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tiny import tiny_tokenizer

from paceline.engines.base import Completion, Finish, Request
from paceline.rollout.renderer import Renderer
from paceline.rollout.score import Score
from paceline.testing import FakeEngine
from paceline.types import Draw, Prompt

EOS = 1
TOKENIZER = tiny_tokenizer()


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def text_of(tokens: Sequence[int]) -> str:
    return str(TOKENIZER.decode(tokens))


def said(text: str, finish: Finish = "stop", stop: str | int | None = None) -> Completion:
    """An answer: with its end token if it stopped by itself."""
    tokens = ids(text) + ([EOS] if finish == "stop" and not isinstance(stop, str) else [])
    logprobs = [-0.5 - i / 8 for i in range(len(tokens))]
    return Completion(tokens, logprobs, [0] * len(tokens), finish, stop=stop)


class ScriptedEngine(FakeEngine):
    """Answers by a function of the request, and keeps the requests. Exceptions are raised."""

    def __init__(self, answer: Callable[[Request], Completion | Exception]) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self._script = answer

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        answer = self._script(request)
        if isinstance(answer, Exception):
            raise answer
        answer.versions = [self.version] * len(answer.tokens)
        return answer


class FakeReward:
    """Scores by a function of (prompt, completion); stands for `Reward`."""

    def __init__(
        self, score: Callable[[Prompt, str], Any], on_failure: str = "drop_sample"
    ) -> None:
        self.on_failure = on_failure
        self._score = score

    async def score(self, prompt: Prompt, completion: str, **_: Any) -> Score:
        found = self._score(prompt, completion)
        return found if isinstance(found, Score) else Score(float(found))


class FakeStream:
    """Prompts "0", "1", ...; remembers what came back."""

    def __init__(self, size: int = 1000) -> None:
        self.waiting = [
            Draw(i, 0, Prompt(id=f"p{i}", text=f"{i}=", answer=str(i))) for i in range(size)
        ]
        self.returned: list[int] = []

    def take(self, n: int) -> list[Draw]:
        taken, self.waiting = self.waiting[:n], self.waiting[n:]
        return taken

    def give_back(self, draws: Sequence[Draw]) -> None:
        self.returned += [draw.ordinal for draw in draws]
        self.waiting = sorted([*draws, *self.waiting], key=lambda draw: draw.ordinal)


def draws(*texts: str) -> list[Draw]:
    return [Draw(i, 0, Prompt(id=f"p{i}", text=text)) for i, text in enumerate(texts)]


def renderer(template: str | None = None) -> Renderer:
    return Renderer(tiny_tokenizer(template))
