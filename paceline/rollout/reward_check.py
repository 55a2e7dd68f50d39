"""Trying a reward on answers that are there already, before any training."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.rollout.rewards import Reward
from paceline.rollout.score import Score
from paceline.types import Prompt


@dataclass(frozen=True, slots=True)
class Answer:
    """One line of the file: `{"prompt": ..., "completion": ..., "answer": ...}`.

    `prompt` is a text or a list of chat messages. Other columns are the prompt's metadata.
    """

    line: int
    prompt: Prompt
    completion: str


@dataclass(frozen=True, slots=True)
class CheckedAnswer:
    """An answer with what the reward gave for it."""

    answer: Answer
    score: Score


def read_answers(path: Path, limit: int | None = None) -> list[Answer]:
    """Read a JSONL file of answers. Raises DataError with file, line and reason."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise DataError(f"{path} can not be read: {exc}") from exc
    lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise DataError(f"{path} has no lines: one object with prompt, completion, answer a line")
    return [_read_answer(f"{path}:{n}", n, line) for n, line in lines[:limit]]


async def check_reward(reward: Reward, answers: Sequence[Answer]) -> list[CheckedAnswer]:
    """Score the answers, in order. Starts the reward; the caller closes it."""
    await reward.start()
    # ends: each score by the reward's time limit
    scores = await asyncio.gather(
        *(reward.score(answer.prompt, answer.completion) for answer in answers)
    )
    return [CheckedAnswer(*pair) for pair in zip(answers, scores, strict=True)]


def _read_answer(where: str, line: int, text: str) -> Answer:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as exc:
        raise DataError(f"{where}: not valid JSON: {exc}") from exc
    if not isinstance(row, dict) or not isinstance(row.get("completion"), str):
        raise DataError(f"{where}: needs an object with the text column 'completion'")
    completion, prompt, answer = (
        row.pop("completion"),
        row.pop("prompt", ""),
        row.pop("answer", None),
    )
    return Answer(line, _to_prompt(where, line, prompt, answer, row), completion)


def _to_prompt(where: str, line: int, prompt: Any, answer: Any, rest: dict[str, Any]) -> Prompt:
    name = str(rest.get("id", line))
    if isinstance(prompt, str):
        return Prompt(name, text=prompt, answer=answer, metadata=rest)
    is_chat = isinstance(prompt, list) and all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt
    )
    if not is_chat or not prompt:
        raise DataError(f"{where}: 'prompt' is neither a text nor a list of chat messages")
    return Prompt(name, messages=tuple(prompt), answer=answer, metadata=rest)
