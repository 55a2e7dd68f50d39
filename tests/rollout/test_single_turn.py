from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rollout_fakes import FakeReward

from paceline.errors import ConfigError
from paceline.rollout.env import Reply
from paceline.rollout.score import Score
from paceline.rollout.single_turn import SingleTurn, load_env
from paceline.types import Prompt

PROMPT = Prompt(id="p", text="1+1=", answer="2")


def replying(reply: Reply) -> Mapping[str, Any]:
    async def actor(context: Any) -> Reply:
        return reply

    return {"policy": actor}


def play(env: Any, reply: Reply = Reply("2", "stop", 2)) -> Any:  # noqa: B008
    return asyncio.run(env(PROMPT, replying(reply)))


def test_it_asks_once_and_scores() -> None:
    reward = FakeReward(lambda prompt, text: Score(float(text == prompt.answer), {"right": 1.0}))
    outcome = play(SingleTurn(reward))  # type: ignore[arg-type]
    assert (outcome.rewards, outcome.parts, outcome.cause) == (
        {"policy": 1.0},
        {"policy": {"right": 1.0}},
        None,
    )


def test_an_aborted_answer_is_not_scored() -> None:
    def never(prompt: Prompt, text: str) -> float:
        raise AssertionError

    outcome = play(SingleTurn(FakeReward(never)), Reply("", "abort", 0))  # type: ignore[arg-type]
    assert outcome.rewards == {"policy": None}


def test_a_failed_score_carries_its_reason() -> None:
    reward = FakeReward(lambda prompt, text: Score(None, cause="timeout", detail="1 s"))
    outcome = play(SingleTurn(reward))  # type: ignore[arg-type]
    assert (outcome.rewards, outcome.cause) == ({"policy": None}, "reward/timeout: 1 s")


def test_without_a_reward_there_is_nothing_to_score() -> None:
    outcome = play(SingleTurn(None))
    assert (outcome.rewards, outcome.cause, outcome.is_scored) == ({"policy": None}, None, False)
    assert play(SingleTurn(None), Reply("", "abort", 0)).is_scored


def test_only_algorithms_that_need_no_reward_go_without() -> None:
    assert isinstance(load_env("single_turn", needs_reward=False), SingleTurn)
    with pytest.raises(ConfigError, match="needs a reward"):
        load_env("single_turn")


SOURCE = """
async def plain(prompt, actors):
    reply = await actors["policy"](prompt)
    return reply.num_tokens

async def scored(prompt, actors, reward):
    reply = await actors["policy"](prompt)
    return (await reward.score(prompt, reply.text)).value

class Game:
    async def __call__(self, prompt, actors):
        return {"a": 1.0, "b": 2.0}
"""


def test_environments_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "own_games.py").write_text(SOURCE)
    reward: Any = FakeReward(lambda prompt, text: 0.25)
    assert play(load_env("own_games.py:plain", base=tmp_path)) == 2
    assert play(load_env("own_games.py:scored", base=tmp_path, reward=reward)) == 0.25
    assert play(load_env("own_games.py:Game", base=tmp_path)) == {"a": 1.0, "b": 2.0}
    with pytest.raises(ConfigError, match="asks for a reward"):
        load_env("own_games.py:scored", base=tmp_path)
    with pytest.raises(ConfigError, match="no 'plan'; did you mean 'plain'"):
        load_env("own_games.py:plan", base=tmp_path)


def test_single_turn_needs_a_reward() -> None:
    with pytest.raises(ConfigError, match="needs a reward"):
        load_env("single_turn")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def play(prompt, actors):\n    return 1.0", "is not async: write `async def`"),
        ("class play:\n    def __call__(self, prompt, actors):\n        return 1", "is not async"),
        ("async def play(prompt):\n    return 1.0", r"takes \(prompt\), .*too many positional"),
        ("async def play(prompt, actors, tool):\n    return 1.0", "missing .* argument: 'tool'"),
        ("async def play(reward, actors):\n    return 1.0", "multiple values for .*'reward'"),
        ("import no_such_package_here", "can not be loaded: .*no_such_package_here.*env.py:1"),
        ("def play(:", "can not be loaded: SyntaxError: .*env.py, line 1"),
        ("import sys\nsys.exit(0)", r"can not be loaded: SystemExit: 0 \(.*env.py:2"),
        ("import asyncio\nraise asyncio.CancelledError", "can not be loaded: CancelledError"),
        ("class play:\n    def __init__(self):\n        exit()", "SystemExit.*env.py:3"),
    ],
)
def test_environments_that_can_not_be_used_are_found_when_they_are_loaded(
    tmp_path: Path, source: str, message: str
) -> None:
    (tmp_path / "env.py").write_text(source)
    reward: Any = FakeReward(lambda prompt, text: 0.0)
    with pytest.raises(ConfigError, match=rf"env = 'env.py:play' .*{message}"):
        load_env("env.py:play", base=tmp_path, reward=reward)


DECORATED = """
import functools

def traced(function):
    @functools.wraps(function)
    def call(*values, **named):
        return function(*values, **named)
    return call

def bare(function):
    return lambda *values: function(*values)

@traced
async def wrapped(prompt, actors, reward):
    return 1.0

@bare
async def hidden(prompt, actors):
    return 2.0
"""


def test_decorated_environments_are_taken(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(DECORATED)
    reward: Any = FakeReward(lambda prompt, text: 0.0)
    assert play(load_env("env.py:wrapped", base=tmp_path, reward=reward)) == 1.0
    assert play(load_env("env.py:hidden", base=tmp_path)) == 2.0


def test_ctrl_c_while_an_environment_is_imported_is_no_fault_of_it(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_env("env.py:play", base=tmp_path)
