from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rollout_fakes import FakeReward, FakeStream, ScriptedEngine, renderer, said, text_of

from paceline.engines.base import Completion, Request
from paceline.errors import RewardError, RolloutError
from paceline.observe.catalogue import describe
from paceline.rollout.actor import Seat
from paceline.rollout.batch import RolloutBatch, collect_batch
from paceline.rollout.runner import Runner
from paceline.rollout.score import Score
from paceline.rollout.settings import RolloutConfig
from paceline.rollout.single_turn import SingleTurn
from paceline.types import Prompt

Scoring = Callable[[int, int], Any]
"""(number of the prompt, index of the episode) -> reward or Score."""


def make(score: Scoring, on_failure: str = "drop_sample", **config: Any) -> Runner:
    """Prompt "12=" in episode 3 is answered "12.3" and scored by score(12, 3)."""
    counts: dict[str, int] = {}

    def answer(request: Request) -> Completion:
        number = text_of(request.tokens)[:-1]
        counts[number] = counts.get(number, -1) + 1
        return said(f"{number}.{counts[number] % config['samples_per_prompt']}")

    def score_text(prompt: Prompt, completion: str) -> Any:
        number, _, index = completion.partition(".")
        return score(int(number), int(index))

    config = {"prompts_per_step": 4, "samples_per_prompt": 2, **config}
    reward = FakeReward(score_text, on_failure)
    return Runner.single(
        ScriptedEngine(answer),
        renderer(),
        SingleTurn(reward),  # type: ignore[arg-type]
        reward,  # type: ignore[arg-type]
        RolloutConfig.model_validate(config),
        policy="policy",
        run_seed=0,
    )


def collect(runner: Runner, stream: FakeStream, **options: Any) -> RolloutBatch:
    return asyncio.run(collect_batch(stream, runner, step=3, **options))


def kept(batch: RolloutBatch) -> list[int]:
    return [group.draw for group in batch.groups]


def varied(number: int, index: int) -> float:
    return float(index)


def easy_below(limit: int) -> Scoring:
    """Prompts below the limit are always right: nothing to learn from them."""
    return lambda number, index: 1.0 if number < limit else float(index)


FAILED = Score(None, cause="timeout", detail="no result after 1 s")


def test_a_step_takes_as_many_prompts_as_configured() -> None:
    stream = FakeStream()
    batch = collect(make(varied), stream)
    assert kept(batch) == [0, 1, 2, 3]
    assert [draw.ordinal for draw in stream.take(1)] == [4]
    assert not batch.is_exhausted
    assert kept(collect(make(varied), FakeStream(), num_prompts=2)) == [0, 1]


def test_every_metric_is_in_the_catalogue_with_its_value() -> None:
    def score(number: int, index: int) -> Score:
        if (number, index) == (3, 1):
            return FAILED
        value = 1.0 if number == 0 else float(index and number != 1)
        return Score(value, {"right": value, "a/b": 2.0})

    values = collect(make(score), FakeStream()).metrics.values()
    assert all(describe(name) for name in values)
    assert values == {
        "rollout/all_correct": 0.25,
        "rollout/all_wrong": 0.5,
        "rollout/answer_tokens": 4.0,
        "rollout/answer_tokens_max": 4.0,
        "rollout/answer_tokens_min": 4.0,
        "rollout/discarded_groups": 0.0,
        "rollout/dropped_groups/failed": 0.0,
        "rollout/dropped_groups/zero_variance": 0.0,
        "rollout/failed": 0.125,
        "rollout/failures/reward/timeout": 1.0,
        "rollout/groups": 4.0,
        "rollout/missing_groups": 0.0,
        "rollout/prompt_tokens": 2.0,
        "rollout/refill_waves": 0.0,
        "rollout/reward": pytest.approx(3 / 7),
        "rollout/reward_group_std": 0.125,
        "rollout/reward_max": 1.0,
        "rollout/reward_min": 0.0,
        "rollout/reward_part/a.b": 2.0,
        "rollout/reward_part/right": pytest.approx(3 / 7),
        "rollout/reward_std": pytest.approx((3 / 7 * 4 / 7) ** 0.5),
        "rollout/sampled_tokens": 28.0,
        "rollout/samples": 8.0,
        "rollout/truncated": 0.0,
        "rollout/zero_variance": 0.75,
    }


def test_dynamic_sampling_replaces_groups_of_equal_rewards() -> None:
    stream = FakeStream()
    batch = collect(make(easy_below(6), dynamic_sampling=True), stream)
    assert kept(batch) == [6, 7, 8, 9]
    assert [(group.draw, reason) for group, reason in batch.dropped] == [
        (i, "zero_variance") for i in range(6)
    ]
    values = batch.metrics.values()
    assert values["rollout/refill_waves"] == 2
    assert values["rollout/dropped_groups/zero_variance"] == 6
    assert values["rollout/samples"] == 20
    assert stream.returned == []


def test_without_dynamic_sampling_they_stay() -> None:
    assert kept(collect(make(easy_below(6)), FakeStream())) == [0, 1, 2, 3]


def test_over_sampling_gives_the_surplus_back_in_order() -> None:
    stream = FakeStream()
    runner = make(easy_below(2), dynamic_sampling=True, over_sampling=2.0)
    batch = collect(runner, stream)
    assert kept(batch) == [2, 3, 4, 5]
    assert [group.draw for group in batch.discarded] == [6, 7]
    assert stream.returned == [6, 7]
    assert batch.metrics.values()["rollout/discarded_groups"] == 2
    assert kept(collect(runner, stream)) == [6, 7, 8, 9]


def test_over_sampling_of_short_decimals_takes_no_prompt_too_many() -> None:
    stream = FakeStream()
    collect(make(varied, prompts_per_step=10, over_sampling=1.1), stream)
    assert stream.returned == [10]


def test_only_the_first_wave_is_over_sampled() -> None:
    stream = FakeStream()
    collect(make(easy_below(8), dynamic_sampling=True, over_sampling=2.0), stream)
    assert stream.returned == []
    assert stream.waiting[0].ordinal == 12


def test_after_the_last_refill_a_step_trains_on_what_it_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    score: Scoring = lambda number, index: float(index) if number == 5 else 1.0  # noqa: E731
    batch = collect(make(score, dynamic_sampling=True, max_refills=2), FakeStream())
    assert kept(batch) == [5]
    assert batch.metrics.values()["rollout/missing_groups"] == 3
    assert "1 of 4 groups after 2 refills" in caplog.text
    assert not batch.is_exhausted


def test_no_group_at_all_is_an_error_that_counts_and_gives_back() -> None:
    stream = FakeStream()
    runner = make(easy_below(1000), dynamic_sampling=True, max_refills=2)
    with pytest.raises(RolloutError, match=r"step 3: none of 12 groups sampled in 3 waves.*12 had"):
        collect(runner, stream)
    assert stream.returned == list(range(12))


def test_an_exhausted_stream_gives_a_smaller_batch_then_none() -> None:
    stream = FakeStream(6)
    runner = make(varied)
    first, second, third = (collect(runner, stream) for _ in range(3))
    assert [kept(batch) for batch in (first, second, third)] == [[0, 1, 2, 3], [4, 5], []]
    assert [batch.is_exhausted for batch in (first, second, third)] == [False, True, True]


def test_a_stream_that_ends_while_refilling_gives_what_there_is() -> None:
    runner = make(easy_below(3), dynamic_sampling=True)
    batch = collect(runner, FakeStream(5))
    assert (kept(batch), batch.is_exhausted) == ([3, 4], True)
    batch = collect(runner, FakeStream(3))
    assert (kept(batch), batch.is_exhausted, len(batch.dropped)) == ([], True, 3)


def test_a_short_over_sampled_wave_with_surplus_has_not_exhausted_the_stream() -> None:
    stream = FakeStream(6)
    batch = collect(make(varied, over_sampling=2.0), stream)
    assert (kept(batch), stream.returned, batch.is_exhausted) == ([0, 1, 2, 3], [4, 5], False)


def test_one_failed_sample_costs_itself_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Cases 31 and 50."""
    caplog.set_level(logging.WARNING)
    score: Scoring = lambda number, index: FAILED if (number, index) == (1, 0) else index  # noqa: E731
    batch = collect(make(score, samples_per_prompt=3), FakeStream())
    assert kept(batch) == [0, 1, 2, 3]
    assert [e.is_trainable for e in batch.groups[1].episodes] == [False, True, True]
    assert "1 samples failed by reward/timeout (p1/0): no result after 1 s" in caplog.text


def test_drop_group_draws_another_prompt() -> None:
    score: Scoring = lambda number, index: FAILED if (number, index) == (1, 0) else index  # noqa: E731
    batch = collect(make(score, "drop_group"), FakeStream())
    assert kept(batch) == [0, 2, 3, 4]
    assert [(group.draw, reason) for group, reason in batch.dropped] == [(1, "failed")]
    assert batch.metrics.values()["rollout/dropped_groups/failed"] == 1


def test_zero_trains_on_the_failed_sample() -> None:
    score: Scoring = lambda number, index: FAILED if index == 0 else 1.0  # noqa: E731
    batch = collect(make(score, "zero"), FakeStream())
    assert [s.reward for s in batch.groups[0].samples()] == [0.0, 1.0]
    assert batch.metrics.values()["rollout/failures/reward/timeout"] == 4


def test_fail_ends_the_step_and_gives_everything_back() -> None:
    stream = FakeStream()
    score: Scoring = lambda number, index: FAILED if (number, index) == (1, 0) else index  # noqa: E731
    with pytest.raises(RewardError, match="prompt 'p1', episode 0: reward/timeout"):
        collect(make(score, "fail"), stream)
    assert stream.returned == [0, 1, 2, 3]


@pytest.mark.parametrize("on_failure", ["drop_sample", "drop_group"])
def test_a_reward_that_always_fails_ends_the_step_after_one_wave(on_failure: str) -> None:
    stream = FakeStream()
    with pytest.raises(RewardError, match="all 8 samples failed: 8 reward/timeout"):
        collect(make(lambda number, index: FAILED, on_failure), stream)
    assert stream.returned == [0, 1, 2, 3]


def test_cancelling_gives_everything_back() -> None:
    stream = FakeStream()

    async def run() -> None:
        runner = make(varied)
        runner._env = hang  # type: ignore[assignment]
        task = asyncio.create_task(collect_batch(stream, runner, step=1))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def hang(prompt: Prompt, actors: object) -> float:
        await asyncio.Event().wait()
        return 0.0

    asyncio.run(run())
    assert stream.returned == [0, 1, 2, 3]


def test_overlong_answers_are_shaped_before_rewards_are_compared() -> None:
    runner = make(
        lambda number, index: 1.0,
        samples_per_prompt=2,
        dynamic_sampling=True,
        sampling={"max_tokens": 4},
        overlong_penalty=1.0,
        overlong_window=2,
    )
    with pytest.raises(RolloutError, match="equal rewards"):
        collect(runner, FakeStream())
    runner = make(varied, sampling={"max_tokens": 4}, overlong_penalty=1.0, overlong_window=2)
    batch = collect(runner, FakeStream())
    assert [s.reward for s in batch.groups[0].samples()] == [-1.0, 0.0]
    assert batch.metrics.values()["rollout/reward_part/overlong"] == -1.0


def test_masked_truncated_answers_are_measured_before_they_are_masked() -> None:
    """Case 86, the part of lengths."""
    runner = make(varied, truncated="mask")
    engine = ScriptedEngine(lambda request: said("12.1", "length"))
    seat = runner._seats["policy"]
    assert isinstance(seat, Seat)
    runner._seats["policy"] = replace(seat, engine=engine)
    batch = collect(runner, FakeStream())
    values = batch.metrics.values()
    assert (values["rollout/truncated"], values["rollout/answer_tokens"]) == (1.0, 4.0)
    assert all(sample.num_trained_tokens == 0 for g in batch.groups for sample in g.samples())
    assert all(sample.reward == 1.0 for g in batch.groups for sample in g.samples())
