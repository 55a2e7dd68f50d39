"""Episodes of several roles: whose tokens become whose samples, and what each role earns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from rollout_fakes import EOS, FakeReward, ScriptedEngine, draws, ids, renderer, said, text_of

from paceline.engines.base import Completion, Request, Sampling
from paceline.errors import ConfigError, EngineError
from paceline.rollout.actor import Seat
from paceline.rollout.env import Actor, Outcome
from paceline.rollout.filters import rewards_of, settle_failures
from paceline.rollout.runner import Runner
from paceline.rollout.seats import AnySeat, SeatPool
from paceline.rollout.settings import RolloutConfig
from paceline.rollout.summary import summarise
from paceline.types import NO_VERSION, Episode, Group, Prompt, Status, derive_seed

Actors = dict[str, Actor]


def seat(policy: str, answer: Callable[[Request], Any] | str = "1", **options: Any) -> Seat:
    def speak(request: Request) -> Completion | Exception:
        found = answer(request) if callable(answer) else answer
        return said(found) if isinstance(found, str) else found

    temperature = options.pop("temperature", 1.0)
    return Seat(
        policy, ScriptedEngine(speak), renderer(), Sampling(temperature=temperature), **options
    )


def requests_of(seat_: AnySeat) -> list[Request]:
    assert isinstance(seat_, Seat)
    assert isinstance(seat_.engine, ScriptedEngine)
    return seat_.engine.requests


def runner(seats: dict[str, AnySeat], env: Any, **config: Any) -> Runner:
    on_failure = config.pop("on_failure", "drop_sample")
    reward: Any = FakeReward(lambda prompt, text: 1.0, on_failure)
    settings = RolloutConfig(**{"samples_per_prompt": 2, "episode_retries": 0, **config})
    return Runner(seats, env, reward, settings, run_seed=0)


def play(seats: dict[str, AnySeat], env: Any, *texts: str, **config: Any) -> list[Group]:
    return asyncio.run(runner(seats, env, **config).collect(draws(*(texts or "1")), step=1))


def told(episode: Episode) -> list[tuple[str, str, str, float | None]]:
    return [(s.role, s.policy, s.status.value, s.reward) for s in episode.samples]


async def solve_and_check(prompt: Prompt, actors: Actors) -> dict[str, float]:
    answer = await actors["solver"](prompt)
    verdict = await actors["verifier"](f"{prompt.text}{answer.text}?")
    is_right = answer.text == "2"
    return {"solver": float(is_right), "verifier": float((verdict.text == "y") == is_right)}


def test_each_role_leaves_samples_of_its_policy_with_its_own_reward() -> None:
    seats: dict[str, AnySeat] = {
        "solver": seat("big", "2", temperature=0.5),
        "verifier": seat("small", "n"),
    }
    (group,) = play(seats, solve_and_check, "1+1=")
    for episode in group.episodes:
        solver, verifier = episode.samples
        assert told(episode) == [
            ("solver", "big", "completed", 1.0),
            ("verifier", "small", "completed", 0.0),
        ]
        assert solver.tokens == [*ids("1+1="), *ids("2"), EOS]
        assert verifier.tokens == [*ids("1+1=2?"), *ids("n"), EOS]
        assert (solver.temperature, verifier.temperature) == (0.5, 1.0)
        assert episode.is_trainable
        assert episode.others == []
    assert len(list(group.samples("big"))) == len(list(group.samples("small"))) == 2
    assert rewards_of(group, "small") == [0.0, 0.0]


def test_several_roles_of_one_policy_share_its_engine_and_keep_samples_apart() -> None:
    one = seat("policy", lambda request: "2" if text_of(request.tokens)[-1] == "=" else "y")
    (group,) = play({"solver": one, "verifier": one}, solve_and_check, "1+1=")
    assert told(group.episodes[0]) == [
        ("solver", "policy", "completed", 1.0),
        ("verifier", "policy", "completed", 1.0),
    ]
    assert rewards_of(group, "policy", "verifier") == [1.0, 1.0]
    assert len(rewards_of(group, "policy")) == 4


def numbered(request: Request) -> str:
    """The number of lines so far: makes every turn different."""
    return str(text_of(request.tokens).count("\n"))


async def round_table(prompt: Prompt, actors: Actors) -> Outcome:
    """Speakers by the digits of the prompt; each hears all that was said."""
    heard = f"{prompt.text}\n"
    names = list(actors)
    for digit in str(prompt.text):
        name = names[int(digit) % len(names)]
        reply = await actors[name](heard)
        heard += f"{reply.text}\n"
    spoken = {names[int(digit) % len(names)] for digit in str(prompt.text)}
    return Outcome({name: float(i) for i, name in enumerate(names) if name in spoken})


def test_turns_and_speakers_change_and_every_token_is_its_speakers() -> None:
    """What others said is an observation: in the sample, outside its mask."""
    seats: dict[str, AnySeat] = {name: seat(name.upper(), numbered) for name in "abc"}
    groups = play(seats, round_table, "00", "0120", "2", "1021021")
    for group in groups:
        for episode in group.episodes:
            speakers = [int(digit) for digit in str(group.prompt.text)]
            assert {s.role for s in episode.samples} == {"abc"[i] for i in speakers}
            heard = f"{group.prompt.text}\n"
            expected: dict[str, list[tuple[int, bool]]] = {}
            known = dict.fromkeys("abc", 0)
            for turn, number in enumerate(speakers):
                name = "abc"[number]
                row = expected.setdefault(name, [])
                row += [(t, False) for t in ids(heard[known[name] :])]
                answer = str(turn + 1)
                row += [(t, True) for t in [*ids(answer), EOS]]
                known[name] = len(heard) + len(answer)
                heard += f"{answer}\n"
            for sample in episode.samples:
                sample.validate()
                found = list(zip(sample.tokens, sample.mask, strict=True))
                assert found == expected[sample.role]
                assert sample.reward == float("abc".index(sample.role))
                outside = [v for v, m in zip(sample.versions, sample.mask, strict=True) if not m]
                assert set(outside) == {NO_VERSION}


def test_a_silent_role_takes_no_part_and_needs_no_reward() -> None:
    async def env(prompt: Prompt, actors: Actors) -> dict[str, float]:
        await actors["a"](prompt)
        if prompt.text == "2":
            await actors["b"](prompt)
            return {"a": 1.0, "b": 0.0}
        return {"a": 1.0}

    groups = play({"a": seat("p"), "b": seat("q")}, env, "1", "2")
    assert [told(group.episodes[0]) for group in groups] == [
        [("a", "p", "completed", 1.0)],
        [("a", "p", "completed", 1.0), ("b", "q", "completed", 0.0)],
    ]
    assert settle_failures(groups[0], "fail") is None
    numbers = summarise(groups, "q").values()
    assert numbers["rollout/role/b/episodes"] == numbers["rollout/samples"] == 2


def test_a_role_that_spoke_and_has_no_reward_fails_the_whole_episode() -> None:
    async def env(prompt: Prompt, actors: Actors) -> dict[str, float]:
        await actors["a"](prompt)
        await actors["b"](prompt)
        return {"a": 1.0}

    (group,) = play({"a": seat("p"), "b": seat("q")}, env)
    assert told(group.episodes[0]) == [
        ("a", "p", "completed", 1.0),
        ("b", "q", "unscored", None),
    ]
    assert rewards_of(group, "p") == []
    assert settle_failures(group, "drop_sample") == "failed"
    numbers = summarise([group], "p").values()
    assert numbers["rollout/failed"] == 1.0
    assert numbers["rollout/failures/env/none"] == 2
    assert settle_failures(group, "zero") is None
    assert [s.reward for s in group.samples()] == [0.0] * 4
    assert all(episode.is_trainable for episode in group.episodes)


def test_an_environment_that_fails_after_one_role_spoke() -> None:
    async def env(prompt: Prompt, actors: Actors) -> float:
        await actors["a"](prompt)
        raise LookupError("no such move")

    (group,) = play({"a": seat("p"), "b": seat("q")}, env)
    (sample,) = group.episodes[0].samples
    assert (sample.role, sample.status, sample.cause) == ("a", Status.FAILED, "env/LookupError")
    with pytest.raises(Exception, match="no such move"):
        settle_failures(group, "fail")
    assert settle_failures(group, "zero") is None
    assert sample.reward == 0.0


def test_an_environment_that_fails_before_anybody_spoke_is_told_by_every_role() -> None:
    async def env(prompt: Prompt, actors: Actors) -> float:
        raise LookupError("no board")

    (group,) = play({"a": seat("p"), "b": seat("q"), "c": seat("r", learns=False)}, env)
    assert [(s.role, s.cause, s.tokens) for s in group.episodes[0].samples] == [
        ("a", "env/LookupError", []),
        ("b", "env/LookupError", []),
    ]
    assert settle_failures(group, "zero") == "failed"


def test_a_request_that_one_engine_refuses_fails_the_episode_and_is_played_again() -> None:
    def answer(request: Request) -> Completion | Exception | str:
        return EngineError("too long") if len(requests_of(refusing)) == 1 else "y"

    refusing = seat("q", answer)
    seats: dict[str, AnySeat] = {"solver": seat("p", "2"), "verifier": refusing}
    groups = play(seats, solve_and_check, "1", "2", samples_per_prompt=1)
    assert [(s.role, s.cause, s.detail) for s in groups[0].samples()] == [
        ("solver", "engine/refused", "role 'verifier': too long"),
    ]
    assert settle_failures(groups[0], "zero") == "failed", "no role is punished for it"
    requests_of(refusing).clear()
    groups = play(seats, solve_and_check, "1", "2", samples_per_prompt=1, episode_retries=1)
    assert [s.status for g in groups for s in g.samples()] == [Status.COMPLETED] * 4
    assert len({request.seed for request in requests_of(refusing)}) == 3


def test_an_engine_that_breaks_ends_the_run_whoever_it_serves() -> None:
    broken = seat("q", lambda request: RuntimeError("out of memory"), learns=False)
    with pytest.raises(RuntimeError, match="out of memory"):
        play({"solver": seat("p"), "verifier": broken}, solve_and_check)


def test_what_frozen_roles_say_is_kept_apart() -> None:
    seats: dict[str, AnySeat] = {
        "solver": seat("p", "2"),
        "verifier": seat("judge", "n", learns=False, label="v1"),
    }
    (group,) = play(seats, solve_and_check, "1+1=")
    episode = group.episodes[0]
    assert told(episode) == [("solver", "p", "completed", 1.0)]
    (other,) = episode.others
    assert (other.role, other.policy, other.label, other.reward) == ("verifier", "judge", "v1", 0.0)
    assert other.tokens == [*ids("1+1=2?"), *ids("n"), EOS]
    assert list(group.samples("judge")) == []


def test_frozen_roles_need_no_reward_and_fail_an_episode_only_if_they_are_not_served() -> None:
    async def env(prompt: Prompt, actors: Actors) -> dict[str, float]:
        await actors["a"](prompt)
        await actors["b"](prompt)
        return {"a": 1.0}

    def answer(request: Request) -> Completion | Exception:
        match text_of(request.tokens):
            case "2":
                return EngineError("asleep")
            case "3":
                return said("1", "abort")
        return said("1", "length")

    groups = play(
        {"a": seat("p"), "b": seat("q", answer, learns=False)}, env, "1", "2", "3",
        samples_per_prompt=1,
    )  # fmt: skip
    found = [next(group.samples()) for group in groups]
    assert [(s.status.value, s.cause) for s in found] == [
        ("completed", None),
        ("failed", "engine/refused"),
        ("failed", "engine/abort"),
    ]
    assert [[o.cause for o in g.episodes[0].others] for g in groups] == [[None], [], [None]]
    assert found[1].detail == "role 'b': asleep"
    assert [settle_failures(group, "zero") for group in groups] == [None, "failed", "failed"]


def test_earlier_selves_are_picked_by_the_place_of_the_episode_alone() -> None:
    async def env(prompt: Prompt, actors: Actors) -> dict[str, float]:
        await actors["a"](prompt)
        await actors["b"](prompt)
        return {"a": 1.0, "b": 0.0}

    pool = SeatPool(keep=3)
    for step in range(5):
        gone = pool.add(f"step-{step}", seat(f"p@{step}", str(step)))
        assert [s.policy for s in gone] == ([f"p@{step - 3}"] if step > 2 else [])
    assert pool.labels == ["step-2", "step-3", "step-4"]

    def labels(groups: list[Group]) -> list[str]:
        return [e.others[0].label for group in groups for e in group.episodes]

    first = play({"a": seat("p"), "b": pool}, env, *"12345678", samples_per_prompt=4)
    assert set(labels(first)) == set(pool.labels)
    again = play({"b": pool, "a": seat("p")}, env, *"12345678", samples_per_prompt=4)
    assert labels(again) == labels(first)
    for group in first:
        for episode in group.episodes:
            (other,) = episode.others
            assert other.text.startswith(other.label[-1])
            assert [sample.role for sample in episode.samples] == ["a"]


def test_nobody_in_the_pool_is_an_error() -> None:
    with pytest.raises(ConfigError, match="nobody in the pool"):
        play({"a": seat("p"), "b": SeatPool()}, solve_and_check)
    with pytest.raises(ConfigError, match="none of the roles a, b"):
        runner({"a": seat("p", learns=False), "b": SeatPool()}, solve_and_check)


def test_seeds_depend_on_names_and_places_never_on_the_order_of_calls() -> None:
    async def at_once(prompt: Prompt, actors: Actors) -> float:
        await asyncio.gather(*(actor(prompt) for actor in actors.values()))
        return 1.0

    async def one_by_one(prompt: Prompt, actors: Actors) -> float:
        for name in sorted(actors, reverse=True):
            await actors[name](prompt)
        return 1.0

    def seeds(env: Any, *names: str) -> dict[str, list[int]]:
        seats: dict[str, AnySeat] = {name: seat("p") for name in names}
        play(seats, env, "1", "2")
        return {name: sorted(r.seed for r in requests_of(found)) for name, found in seats.items()}

    found = seeds(at_once, "p", "x", "y")
    assert seeds(one_by_one, "y", "x", "p") == found
    assert len({seed for of_role in found.values() for seed in of_role}) == 12
    assert found["p"] == sorted(
        derive_seed(0, "p", "sample", i, f"p{i}", episode) for i in range(2) for episode in range(2)
    )
    alone = seeds(one_by_one, "p")
    assert alone["p"] == found["p"], "the role of the policy's name is that of a run of one role"


def test_one_reward_for_all_and_names_that_are_no_roles() -> None:
    def returning(result: Any) -> Any:
        async def env(prompt: Prompt, actors: Actors) -> Any:
            for actor in actors.values():
                await actor(prompt)
            return result

        return env

    seats: dict[str, AnySeat] = {"a": seat("p"), "b": seat("q")}
    (group,) = play(seats, returning(0.5))
    assert {s.reward for s in group.samples()} == {0.5}
    (group,) = play(seats, returning({"a": {"right": 1.0, "short": 0.5}, "b": 0.0}))
    assert [(s.reward, s.reward_parts) for s in group.episodes[0].samples] == [
        (1.5, {"right": 1.0, "short": 0.5}),
        (0.0, {}),
    ]
    (group,) = play(seats, returning({"a": 1.0, "bb": 0.0}))
    assert {(s.cause, s.detail) for s in group.samples()} == {
        ("env/unknown_role", "it gives a reward to 'bb'; there is 'a', 'b'")
    }


def test_numbers_of_each_role_only_where_there_are_several() -> None:
    one = seat("policy", lambda r: "2" if text_of(r.tokens)[-1] == "=" else "n")
    seats: dict[str, AnySeat] = {"solver": one, "verifier": one}
    numbers = summarise(play(seats, solve_and_check, "1+1="), "policy").values()
    assert numbers["rollout/reward"] == 0.5
    assert numbers["rollout/role/solver/reward"] == 1.0
    assert numbers["rollout/role/verifier/reward"] == 0.0
    assert numbers["rollout/role/verifier/turns"] == 1.0
    assert numbers["rollout/role/verifier/answer_tokens"] == 2.0
    assert (numbers["rollout/all_correct"], numbers["rollout/all_wrong"]) == (0.0, 0.0)

    async def ask(prompt: Prompt, actors: Actors) -> float:
        await actors["policy"](prompt)
        return 1.0

    alone = summarise(play({"policy": one}, ask), "policy").values()
    assert not [name for name in alone if name.startswith("rollout/role/")]


def test_a_draw_that_is_cut_short_keeps_what_was_said() -> None:
    """The engine ends what it works on; turns that follow are empty, and rewards are given."""

    class Slow(ScriptedEngine):
        async def generate(self, request: Request) -> Completion:
            self.requests.append(request)
            if len(self.requests) == 6:
                all_asked.set()
            if text_of(request.tokens)[0] == "1":
                ended = asyncio.Event()
                assert request.cut is not None
                with request.cut.listening(ended.set):
                    await ended.wait()
                return said("42", "length")
            return said("1")

    async def twice(prompt: Prompt, actors: Actors) -> float:
        reply = await actors["policy"](prompt)
        await actors["policy"](f"{prompt.text}{reply.text}more")
        return 0.5

    engine, all_asked = Slow(lambda request: said("1")), asyncio.Event()

    async def main() -> list[Group]:
        running = runner({"policy": Seat("policy", engine, renderer(), Sampling())}, twice)
        first, second = draws("1", "2")
        task = asyncio.create_task(running.collect([first, second], step=1))
        await all_asked.wait()
        assert running.cut_short(first)
        groups = await task
        assert not running.cut_short(first), "it is not collected any more"
        return groups

    cut, whole = asyncio.run(main())
    assert [(s.status, s.reward) for s in cut.samples()] == [(Status.TRUNCATED, 0.5)] * 2
    for sample in cut.samples():
        assert sample.num_trained_tokens == 2
        sample.validate()
    assert {s.status for s in whole.samples()} == {Status.COMPLETED}
    assert len(engine.requests) == 6
