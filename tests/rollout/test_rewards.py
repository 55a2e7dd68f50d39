from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError, MissingExtraError
from paceline.rollout.rewards import Reward, build_reward, reward_values
from paceline.rollout.score import Score
from paceline.rollout.settings import RewardConfig
from paceline.types import Prompt

PROMPT = Prompt(id="p", text="40+2=", answer="42", metadata={"level": 3})


def config(**fields: Any) -> RewardConfig:
    return RewardConfig.model_validate(fields)


def score_all(
    reward: Reward, completions: Sequence[str] = ("42",), prompt: Prompt = PROMPT
) -> list[Score]:
    async def run() -> list[Score]:
        async with reward:
            return [await reward.score(prompt, text) for text in completions]

    return asyncio.run(run())


def test_a_cheap_kind_needs_no_process() -> None:
    reward = build_reward(config(kind="exact"))
    assert [s.value for s in score_all(reward, ["42", "43"])] == [1.0, 0.0]
    assert reward.pool is None


def test_a_prompt_without_usable_answer_can_not_be_scored() -> None:
    (score,) = score_all(build_reward(config(kind="numeric")), prompt=Prompt(id="p", text="?"))
    assert (score.value, score.cause) == (None, "ValueError")
    assert "no answer" in score.detail


def test_a_file_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "def score(completion, answer, metadata, num_tokens=0):\n"
        "    return {'right': completion == answer, 'level': metadata['level']}\n"
    )
    reward = build_reward(
        config(function="rewards.py:score", weights={"right": 2.0}), base=tmp_path
    )
    assert score_all(reward) == [
        Score(2.0, {"right": 1.0, "level": 3.0}, seconds=pytest.approx(0, abs=1))
    ]


def test_lambdas_and_callable_objects_travel_by_value() -> None:
    class Judge:
        def __init__(self, worth: float) -> None:
            self.worth = worth

        def __call__(self, completion: str) -> float:
            return self.worth

    def values(function: Callable[..., Any]) -> list[float | None]:
        return [s.value for s in score_all(build_reward(config(), function=function))]

    assert values(lambda completion, answer: completion == answer) == [1.0]
    assert values(Judge(0.75)) == [0.75]


def test_a_function_of_a_module_that_the_worker_can_not_import() -> None:
    assert module_level(completion="") == 0.25
    assert score_all(build_reward(config(), function=module_level))[0].value == 0.25


WORTH = 0.25


def module_level(completion: str) -> float:
    return WORTH


def test_a_function_that_can_not_travel_is_refused_at_once() -> None:
    lock = threading.Lock()

    def score(completion: str) -> float:
        with lock:
            return 0.0

    with pytest.raises(ConfigError, match=r"score can not be sent.*file of its own"):
        build_reward(config(), function=score)


def test_a_signature_that_asks_for_something_unknown_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="did you mean 'completion'"):
        build_reward(config(), function=lambda completions: 0.0)


def test_start_finds_a_wrong_function_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def score(completion, solution): return 0.0\n")

    async def run() -> None:
        async with build_reward(config(function="rewards.py:score"), base=tmp_path) as reward:
            await reward.start()

    with pytest.raises(ConfigError, match="'solution'"):
        asyncio.run(run())


def test_weighted_parts_are_summed_and_logged_unweighted(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "def two(completion): return {'a': 1, 'b': 0.5}\ndef none(completion): return None\n"
    )
    parts = [
        {"name": "right", "kind": "exact"},
        {"name": "form", "kind": "regex", "pattern": r"^\d+$", "weight": 0.2},
        {"name": "mine", "function": "r.py:two", "weight": 0.1},
        {"name": "shown", "function": "r.py:none", "weight": 0.0},
    ]
    (score,) = score_all(build_reward(config(parts=parts), base=tmp_path))
    assert score.value == pytest.approx(1.0 + 0.2 + 0.15)
    assert score.parts == {"right": 1.0, "form": 1.0, "mine": 1.5, "mine.a": 1.0, "mine.b": 0.5}


def test_a_failed_part_that_weighs_fails_the_whole_and_keeps_the_others(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def bad(completion): return float('nan')\n")
    parts = [
        {"name": "right", "kind": "exact"},
        {"name": "bad", "function": "r.py:bad", "weight": 0.1},
    ]
    (score,) = score_all(build_reward(config(parts=parts), base=tmp_path))
    assert (score.value, score.cause, score.parts) == (None, "nan", {"right": 1.0})
    assert score.detail.startswith("part 'bad'")


def test_a_missing_extra_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"paceline\[math\]"):
        build_reward(config(kind="math_verify"))


def test_an_empty_or_doubled_reward_is_refused() -> None:
    with pytest.raises(ConfigError, match="is empty"):
        build_reward(config())
    with pytest.raises(ConfigError, match="names one too"):
        build_reward(config(kind="exact"), function=lambda completion: 0.0)


def test_what_a_function_may_ask_for() -> None:
    values = reward_values(PROMPT, "42", "length", 2)
    assert values == {
        "completion": "42",
        "prompt": "40+2=",
        "answer": "42",
        "metadata": {"level": 3},
        "messages": [{"role": "user", "content": "40+2="}],
        "finish": "length",
        "num_tokens": 2,
    }
    chat = Prompt(
        id="c",
        messages=({"role": "system", "content": "s"}, {"role": "user", "content": "u"}),
    )
    assert reward_values(chat, "", "stop", 0)["prompt"] == "u"
    assert len(reward_values(chat, "", "stop", 0)["messages"]) == 2


def test_math_verify_runs_in_a_worker() -> None:
    pytest.importorskip("math_verify")
    reward = build_reward(config(kind="math_verify"))
    prompt = Prompt(id="p", text="?", answer=r"\frac{1}{2}")
    scores = score_all(reward, [r"It is $\boxed{0.5}$.", "2"], prompt)
    assert [score.value for score in scores] == [1.0, 0.0]
