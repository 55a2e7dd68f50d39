"""What environments may do wrong, and what it does to their episode and to the run."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
from typing import Any

import pytest
from rollout_fakes import (
    EOS,
    ScriptedEngine,
    ids,
    renderer,
    said,
    text_of,
)
from runners import Actors, collect, make, statuses

from paceline.engines.base import Completion, Request, Sampling
from paceline.errors import ConfigError, RolloutError
from paceline.rollout import runner as runner_module
from paceline.rollout.env import Outcome
from paceline.rollout.runner import Runner
from paceline.rollout.settings import RolloutConfig
from paceline.rollout.summary import summarise
from paceline.types import Draw, Message, Prompt, Sample, Status


async def raises(prompt: Prompt, actors: Actors) -> float:
    await actors["policy"](prompt)
    raise LookupError("no such tool")


async def cancels_itself(prompt: Prompt, actors: Actors) -> float:
    raise asyncio.CancelledError


async def hangs(prompt: Prompt, actors: Actors) -> float:
    await actors["policy"](prompt)
    await asyncio.Event().wait()
    return 1.0


async def times_out_itself(prompt: Prompt, actors: Actors) -> float:
    raise TimeoutError("tool")


async def leaves(prompt: Prompt, actors: Actors) -> float:
    sys.exit(0)


async def stops_what_it_stands_in(prompt: Prompt, actors: Actors) -> float:
    raise BaseExceptionGroup("tools", [SystemExit(1)])


def answers_at_once(prompt: Prompt, actors: Actors) -> float:
    return 1.0


async def asks_a_number(prompt: Prompt, actors: Actors) -> float:
    await actors["policy"](3)  # type: ignore[arg-type]
    return 1.0


async def asks_without_a_role(prompt: Prompt, actors: Actors) -> float:
    await actors["policy"]([{"content": "x"}])  # type: ignore[typeddict-item]
    return 1.0


async def counts_in_words(prompt: Prompt, actors: Actors) -> Outcome:
    await actors["policy"](prompt)
    return Outcome({"policy": 1.0}, metrics={"turns": "three"})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("env", "cause", "num_trained"),
    [
        (leaves, "env/SystemExit", 0),
        (stops_what_it_stands_in, "env/BaseExceptionGroup", 0),
        (answers_at_once, "env/not_async", 0),
        (asks_a_number, "env/TypeError", 0),
        (asks_without_a_role, "env/TypeError", 0),
        (counts_in_words, "env/bad_metric", 2),
        (raises, "env/LookupError", 2),
        (cancels_itself, "env/CancelledError", 0),
        (hangs, "env/timeout", 2),
        (times_out_itself, "env/TimeoutError", 0),
    ],
)
def test_a_failing_environment_is_a_failed_sample(env: Any, cause: str, num_trained: int) -> None:
    runner = make(
        ScriptedEngine(lambda request: said("1")),
        env=env,
        episode_timeout_s=0.05,
        samples_per_prompt=1,
    )
    groups = collect(runner, "1")
    assert statuses(groups) == [("failed", cause)]
    (sample,) = groups[0].samples()
    assert sample.num_trained_tokens == num_trained
    assert not groups[0].episodes[0].is_trainable


def test_an_environment_that_can_not_be_cancelled_ends_the_run_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "CANCEL_TIMEOUT_S", 0.05)
    release = asyncio.Event()

    async def swallows(prompt: Prompt, actors: Actors) -> float:
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()
        return 1.0

    async def body() -> None:
        runner = make(
            ScriptedEngine(lambda request: said("1")),
            env=swallows,
            episode_timeout_s=0.05,
            samples_per_prompt=2,
        )
        with pytest.raises(RolloutError, match=r"2 of 2 episodes.*CancelledError"):
            await runner.collect([Draw(0, 0, Prompt("p", text="1"))], step=1)
        release.set()

    asyncio.run(body())


def test_a_failing_environment_names_its_line() -> None:
    runner = make(ScriptedEngine(lambda request: said("1")), env=raises, samples_per_prompt=1)
    (sample,) = collect(runner, "1")[0].samples()
    assert "no such tool" in sample.detail
    assert "in raises" in sample.detail.partition("\n")[0]


def test_a_failed_episode_has_no_metrics_and_its_siblings_live() -> None:
    seen = []

    async def env(prompt: Prompt, actors: Actors) -> Outcome:
        seen.append(prompt.text)
        await actors["policy"](prompt)
        value: Any = "three" if len(seen) == 1 else 3
        return Outcome({"policy": 1.0}, metrics={"turns": value})

    runner = make(ScriptedEngine(lambda request: said("1")), env=env)
    (group,) = collect(runner, "1")
    assert statuses([group]) == [("failed", "env/bad_metric"), ("completed", None)]
    assert [episode.metrics for episode in group.episodes] == [{}, {"turns": 3.0}]
    assert "metrics['turns'] is str 'three'" in next(group.samples()).detail


def test_a_role_without_a_reward_is_named() -> None:
    env = returning(Outcome({}))
    runner = make(ScriptedEngine(lambda request: said("1")), env=env, samples_per_prompt=1)
    (sample,) = collect(runner, "1")[0].samples()
    assert (sample.cause, sample.detail) == (
        "env/none",
        "the environment gave no reward for the role 'policy'",
    )


def test_ctrl_c_in_an_environment_ends_the_run() -> None:
    async def env(prompt: Prompt, actors: Actors) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(make(ScriptedEngine(lambda request: said("1")), env=env), "1")


def returning(result: Any) -> Any:
    async def env(prompt: Prompt, actors: Actors) -> Any:
        await actors["policy"](prompt)
        return result

    return env


@pytest.mark.parametrize(
    ("result", "reward", "parts", "cause"),
    [
        (0.5, 0.5, {}, None),
        (True, 1.0, {}, None),
        ({"policy": 2}, 2.0, {}, None),
        ({"right": 1, "form": 0.5}, 1.5, {"right": 1.0, "form": 0.5}, None),
        (Outcome({"policy": 3.0}, {"policy": {"a": 3.0}}), 3.0, {"a": 3.0}, None),
        (None, None, {}, "reward/none"),
        (math.nan, None, {}, "reward/nan"),
        ("high", None, {}, "reward/bad_result"),
        (Outcome({"policy": math.nan}), None, {}, "env/nan"),
        (Outcome({"policy": -math.inf}), None, {}, "env/inf"),
        (Outcome({"policy": None}), None, {}, "env/none"),
        (Outcome({}, cause="judge away"), None, {}, "env/unscored"),
        (Outcome({}, cause="reward/timeout: 10 s"), None, {}, "reward/timeout"),
    ],
)
def test_what_an_environment_may_return(
    result: Any, reward: float | None, parts: dict[str, float], cause: str | None
) -> None:
    runner = make(
        ScriptedEngine(lambda request: said("1")), env=returning(result), samples_per_prompt=1
    )
    (sample,) = collect(runner, "1")[0].samples()
    assert (sample.reward, sample.reward_parts, sample.cause) == (reward, parts, cause)
    assert sample.status is (Status.UNSCORED if cause else Status.COMPLETED)


def test_an_environment_may_set_the_status_and_metrics() -> None:
    outcome = Outcome({"policy": 0.0}, status={"policy": Status.TRUNCATED}, metrics={"turns": 3.0})
    runner = make(
        ScriptedEngine(lambda request: said("1")), env=returning(outcome), samples_per_prompt=1
    )
    (group,) = collect(runner, "1")
    assert statuses([group]) == [("truncated", None)]
    assert group.episodes[0].metrics == {"turns": 3.0}


def test_a_log_prob_that_is_not_finite_fails_its_sample_alone() -> None:
    def answer(request: Request) -> Completion:
        completion = said("1")
        if text_of(request.tokens) == "2":
            completion.logprobs[0] = math.nan
        return completion

    groups = collect(
        make(ScriptedEngine(answer), samples_per_prompt=1, episode_retries=0), "1", "2"
    )
    assert statuses(groups) == [("completed", None), ("failed", "engine/invalid")]


def test_errors_of_the_users_configuration_are_not_failed_samples() -> None:
    chat = Draw(0, 0, Prompt(id="c", messages=(Message(role="user", content="hi"),)))
    runner = make(ScriptedEngine(lambda request: said("1")))
    with pytest.raises(ConfigError, match="no chat template"):
        asyncio.run(runner.collect([chat], step=1))


def test_an_engine_with_columns_that_do_not_fit_ends_the_run() -> None:
    runner = make(ScriptedEngine(lambda request: Completion([4], [], [], "stop")))
    with pytest.raises(RolloutError, match="log-probs"):
        collect(runner, "1")


def test_settings_of_one_call_and_of_one_runner() -> None:
    engine = ScriptedEngine(lambda request: said("1"))
    greedy = Sampling(temperature=0.0)
    collect(make(engine), "1", samples_per_prompt=3, sampling=greedy)
    assert [request.sampling for request in engine.requests] == [greedy] * 3
    engine.requests.clear()
    runner = Runner.single(
        engine,
        renderer(),
        returning(1.0),
        None,
        RolloutConfig(),
        policy="policy",
        run_seed=0,
        samples_per_prompt=1,
        sampling=greedy,
    )
    collect(runner, "1")
    assert [request.sampling for request in engine.requests] == [greedy]


def test_sampled_tokens_are_what_is_trained() -> None:
    groups = collect(make(ScriptedEngine(lambda request: said("42"))), "1+1=")
    samples: list[Sample] = list(groups[0].samples())
    for sample in samples:
        assert sample.tokens == [*ids("1+1="), *ids("42"), EOS]
        sample.validate()


def test_samples_that_nobody_scores_can_be_trained_on_without_reward() -> None:
    async def play(prompt: Prompt, actors: Actors) -> Outcome:
        await actors["policy"](prompt)
        return Outcome({}, is_scored=False)

    groups = collect(make(ScriptedEngine(lambda request: said("2")), env=play), "1+1=")
    assert statuses(groups) == [("completed", None)] * 2
    assert [s.reward for group in groups for s in group.samples()] == [None, None]
    metrics = summarise(groups, "policy").values()
    assert metrics["rollout/failed"] == 0
    assert not [name for name in metrics if "reward" in name or "zero_variance" in name]
