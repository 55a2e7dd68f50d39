from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from paceline.errors import DataError
from paceline.rollout.reward_check import check_reward, read_answers
from paceline.rollout.rewards import build_reward
from paceline.rollout.settings import RewardConfig


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_answers_of_a_file_are_scored_in_order(tmp_path: Path) -> None:
    path = write(
        tmp_path / "answers.jsonl",
        {"prompt": "1+1=", "completion": "2", "answer": "2", "level": 1},
        {"prompt": [{"role": "user", "content": "?"}], "completion": "5", "answer": "4"},
        {"prompt": "?", "completion": "x"},
    )
    answers = read_answers(path)
    assert answers[0].prompt.metadata == {"level": 1}
    assert answers[1].prompt.messages == ({"role": "user", "content": "?"},)

    async def run() -> list[tuple[int, float | None, str | None]]:
        async with build_reward(RewardConfig(kind="exact")) as reward:
            checked = await check_reward(reward, answers)
            return [(c.answer.line, c.score.value, c.score.cause) for c in checked]

    assert asyncio.run(run()) == [(1, 1.0, None), (2, 0.0, None), (3, None, "ValueError")]
    assert len(read_answers(path, limit=2)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no lines"),
        ('{"completion": "a"}\n{', r"answers.jsonl:2: not valid JSON"),
        ('{"prompt": "a"}', "needs an object with the text column 'completion'"),
        ("[1]", "needs an object"),
        ('{"completion": "a", "prompt": 3}', "neither a text nor a list"),
        ('{"completion": "a", "prompt": []}', "neither a text nor a list"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_answers(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="can not be read"):
        read_answers(tmp_path / "absent.jsonl")
