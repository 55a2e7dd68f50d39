from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from rollout_fakes import (
    EOS,
    FakeReward,
    ScriptedEngine,
    draws,
    ids,
    renderer,
    said,
    text_of,
)

from paceline.engines.base import Completion, Request, Sampling
from paceline.errors import ConfigError, EngineError, RolloutError
from paceline.rollout.env import Actor, Outcome
from paceline.rollout.runner import Runner
from paceline.rollout.score import Score
from paceline.rollout.settings import RolloutConfig
from paceline.rollout.single_turn import SingleTurn
from paceline.types import Draw, Group, Message, Prompt, Sample, Status

Actors = Mapping[str, Actor]


def make(
    engine: ScriptedEngine,
    *,
    env: Any = None,
    reward: FakeReward | None = None,
    template: str | None = None,
    run_seed: int = 0,
    policy: str = "policy",
    purpose: str = "sample",
    **config: Any,
) -> Runner:
    reward = reward or FakeReward(lambda prompt, completion: 1.0)
    fields = {"samples_per_prompt": 2, **config}
    return Runner(
        engine,
        renderer(template),
        env or SingleTurn(reward),  # type: ignore[arg-type]
        reward,  # type: ignore[arg-type]
        RolloutConfig(**fields),
        policy=policy,
        run_seed=run_seed,
        purpose=purpose,
    )


def collect(runner: Runner, *texts: str, **options: Any) -> list[Group]:
    return asyncio.run(runner.collect(draws(*texts), step=1, **options))


def statuses(groups: list[Group]) -> list[tuple[str, str | None]]:
    return [(s.status.value, s.cause) for group in groups for s in group.samples()]


def test_groups_come_in_the_order_of_the_draws_with_scored_samples() -> None:
    engine = ScriptedEngine(lambda request: said(text_of(request.tokens)[0]))
    reward = FakeReward(lambda prompt, completion: Score(float(completion), {"a": 2.0}))
    groups = collect(make(engine, reward=reward), "3=", "1=", "2=")
    assert [group.prompt.text for group in groups] == ["3=", "1=", "2="]
    assert [group.draw for group in groups] == [0, 1, 2]
    assert [[s.reward for s in group.samples()] for group in groups] == [[3, 3], [1, 1], [2, 2]]
    assert all(s.reward_parts == {"a": 2.0} for group in groups for s in group.samples())
    assert [[e.index for e in group.episodes] for group in groups] == [[0, 1]] * 3
    assert statuses(groups) == [("completed", None)] * 6
    assert collect(make(engine)) == []


def test_the_engine_sees_every_request_before_it_answers_one() -> None:
    class Waiting(ScriptedEngine):
        async def generate(self, request: Request) -> Completion:
            self.requests.append(request)
            await asyncio.sleep(0)
            seen.append(len(self.requests))
            return said("1")

    seen: list[int] = []
    engine = Waiting(lambda request: said("1"))
    collect(make(engine), "1", "2", "3")
    assert seen == [6] * 6
    assert [text_of(request.tokens) for request in engine.requests] == list("112233")
    assert [request.group for request in engine.requests] == [
        f"policy/{i}" for i in (0, 0, 1, 1, 2, 2)
    ]


def seeds(draws_: list[Draw], **options: Any) -> dict[tuple[int, int], int]:
    engine = ScriptedEngine(lambda request: said("1"))
    runner = make(engine, **options)
    groups = asyncio.run(runner.collect(draws_, step=1))
    found = iter(engine.requests)
    return {(g.draw, e.index): next(found).seed for g in groups for e in g.episodes}


def test_seeds_are_distinct_and_depend_on_nothing_but_their_place() -> None:
    all_draws = draws(*"12345678")
    at_once = seeds(all_draws, samples_per_prompt=4)
    assert len(set(at_once.values())) == 32
    assert seeds(all_draws, samples_per_prompt=4) == at_once
    chunked = seeds(all_draws[5:], samples_per_prompt=4) | seeds(
        all_draws[:5], samples_per_prompt=4
    )
    assert chunked == at_once
    for other in ({"run_seed": 1}, {"policy": "other"}, {"purpose": "eval/held"}):
        different = seeds(all_draws, samples_per_prompt=4, **other)
        assert not set(different.values()) & set(at_once.values())
    again = Draw(8, 1, all_draws[0].prompt)
    assert not set(seeds([again]).values()) & set(at_once.values())


def test_later_turns_and_retries_have_seeds_of_their_own() -> None:
    def answer(request: Request) -> Completion | Exception:
        return EngineError("busy") if len(engine.requests) == 1 else said("1")

    async def twice(prompt: Prompt, actors: Actors) -> float:
        await actors["policy"](prompt)
        await actors["policy"]("again")
        return 1.0

    engine = ScriptedEngine(answer)
    collect(make(engine, env=twice, samples_per_prompt=1), "1", "2")
    assert len(engine.requests) == 5
    assert len({request.seed for request in engine.requests}) == 5


def test_cut_off_and_aborted_answers() -> None:
    def answer(request: Request) -> Completion:
        return said("1", {"1": "length", "2": "abort"}.get(text_of(request.tokens), "stop"))  # type: ignore[arg-type]

    engine = ScriptedEngine(answer)
    groups = collect(make(engine, samples_per_prompt=1, episode_retries=0), "1", "2", "3")
    assert statuses(groups) == [
        ("truncated", None),
        ("aborted", "engine/abort"),
        ("completed", None),
    ]
    assert [s.reward for group in groups for s in group.samples()] == [1.0, None, 1.0]


def test_an_episode_that_was_not_served_is_played_again_and_keeps_its_siblings() -> None:
    def answer(request: Request) -> Completion | Exception:
        match len(engine.requests):
            case 2:
                return EngineError("busy")
            case 3:
                return said("9", "abort")
        return said("1")

    engine = ScriptedEngine(answer)
    groups = collect(make(engine), "1", "2")
    assert statuses(groups) == [("completed", None)] * 4
    assert len(engine.requests) == 6


def test_a_refusal_that_stays_is_a_failed_sample_and_its_siblings_live() -> None:
    def answer(request: Request) -> Completion | Exception:
        return EngineError("too long for 8") if text_of(request.tokens) == "2" else said("1")

    groups = collect(make(ScriptedEngine(answer), samples_per_prompt=1), "1", "2")
    assert statuses(groups) == [("completed", None), ("failed", "engine/refused")]
    (sample,) = groups[1].samples()
    assert sample.detail == "too long for 8"
    assert (sample.tokens, any(sample.mask), sample.reward) == (ids("2"), False, None)


def test_an_environment_that_hides_a_refusal_does_not_hide_it_from_the_run() -> None:
    async def env(prompt: Prompt, actors: Actors) -> float:
        try:
            await actors["policy"](prompt)
        except EngineError:
            return 1.0
        return 0.5

    def answer(request: Request) -> Completion | Exception:
        return EngineError("no") if text_of(request.tokens) == "2" else said("1")

    groups = collect(make(ScriptedEngine(answer), env=env, samples_per_prompt=1), "1", "2")
    assert statuses(groups) == [("completed", None), ("failed", "engine/refused")]


def test_a_broken_engine_ends_everything_with_its_own_exception() -> None:
    cancelled = []

    async def env(prompt: Prompt, actors: Actors) -> float:
        try:
            if prompt.text == "2":
                await actors["policy"](prompt)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(prompt.text)
            raise
        return 1.0

    fault = RuntimeError("CUDA error: device-side assert")
    runner = make(ScriptedEngine(lambda request: fault), env=env, samples_per_prompt=1)
    with pytest.raises(RuntimeError) as caught:
        collect(runner, "1", "2", "3")
    assert caught.value is fault
    assert sorted(cancelled) == ["1", "3"]


def test_a_broken_engine_is_not_hidden_by_the_environment() -> None:
    async def env(prompt: Prompt, actors: Actors) -> float:
        try:
            await actors["policy"](prompt)
        except Exception:
            return 0.0
        return 1.0

    with pytest.raises(RuntimeError, match="out of memory"):
        collect(make(ScriptedEngine(lambda request: RuntimeError("out of memory")), env=env), "1")


def test_an_engine_that_serves_nobody_ends_the_run_with_its_own_exception() -> None:
    with pytest.raises(EngineError, match="asleep"):
        collect(make(ScriptedEngine(lambda request: EngineError("asleep"))), "1", "2")


def test_cancelling_cancels_every_episode() -> None:
    ended = []

    async def env(prompt: Prompt, actors: Actors) -> float:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(prompt.text)
        return 1.0

    async def run() -> None:
        runner = make(ScriptedEngine(lambda request: said("1")), env=env)
        task = asyncio.create_task(runner.collect(draws("1", "2"), step=1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
    assert ended == ["1", "1", "2", "2"]


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
    runner = Runner(
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
