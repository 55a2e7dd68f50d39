"""One eval set measured on a fake runner."""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from batches import group_of, make_group, make_sample

from paceline.evals.run import EvalResult, PreparedSet, run_eval, run_evals
from paceline.evals_settings import EvalSet
from paceline.observe.catalogue import describe
from paceline.rollout.settings import OnFailure
from paceline.types import Draw, Group, Prompt, Status


class FakeRunner:
    """Answers with what a function makes of each draw; None leaves a draw out."""

    def __init__(self, answer: Callable[[Draw], Group | None]) -> None:
        self.answer = answer
        self.calls: list[list[Draw]] = []

    async def collect(self, draws: Sequence[Draw], *, step: int) -> list[Group]:
        self.calls.append(list(draws))
        groups = [self.answer(draw) for draw in draws]
        return [group for group in groups if group is not None]


def prepare(
    runner: Any, num_prompts: int = 2, on_failure: OnFailure = "drop_sample", **settings: Any
) -> PreparedSet:
    block = {"name": "heldout", "data": {"path": "x.jsonl"}} | settings
    prompts = [Prompt(id=f"p{i}", text="?") for i in range(num_prompts)]
    return PreparedSet(EvalSet.model_validate(block), prompts, runner, on_failure)


def measure(prepared: PreparedSet, timeout_s: float = 60.0) -> EvalResult:
    return asyncio.run(
        run_eval(prepared, policy="policy", step=20, version=40, timeout_s=timeout_s)
    )


def rewards(*by_prompt: list[float]) -> FakeRunner:
    return FakeRunner(lambda draw: group_of(by_prompt[draw.ordinal], draw.prompt.id))


def test_mean_pass_at_k_and_interval() -> None:
    runner = rewards([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0])
    result = measure(prepare(runner, 3, samples_per_prompt=4, pass_at=[1, 2, 4]))
    assert result.skipped is None
    assert result.reward is not None
    assert result.reward.value == pytest.approx(0.25)
    assert result.reward.standard_error == pytest.approx(0.25 / math.sqrt(3))
    assert result.pass_at[1].value == pytest.approx(0.25)
    assert result.pass_at[2].value == pytest.approx((1 / 2 + 5 / 6) / 3)
    assert result.pass_at[4].value == pytest.approx(2 / 3)
    assert (result.num_prompts, result.num_samples) == (3, 12)
    assert (result.step, result.version) == (20, 40)
    assert result.mean_tokens == 2.0
    assert [group.prompt.id for group in result.groups] == ["p0", "p1", "p2"]


def test_the_draws_are_the_same_every_time_and_at_most_limit() -> None:
    runner = rewards([1.0], [0.0], [1.0])
    prepared = prepare(runner, 3, limit=2)
    measure(prepared)
    measure(prepared)
    assert runner.calls[0] == runner.calls[1]
    assert [(d.ordinal, d.epoch, d.prompt.id) for d in runner.calls[0]] == [
        (0, 0, "p0"),
        (1, 0, "p1"),
    ]


def test_what_was_not_scored_is_left_out_and_counted_by_cause() -> None:
    def answer(draw: Draw) -> Group | None:
        if draw.ordinal == 2:
            return None
        lost = make_sample(None, status=Status.UNSCORED, episode=2)
        lost.cause = "timeout"
        return make_group(
            [
                [make_sample(1.0)],
                [make_sample(0.0, status=Status.TRUNCATED, episode=1)],
                [lost],
                [make_sample(None, status=Status.ABORTED, episode=3)],
            ],
            draw.prompt.id,
        )

    result = measure(prepare(FakeRunner(answer), 3, samples_per_prompt=4, pass_at=[2, 4]))
    assert result.failures == {"aborted": 2, "missing": 4, "timeout": 2}
    assert result.reward is not None
    assert result.reward.value == 0.5
    assert result.truncated == 0.5
    assert (result.num_prompts, result.num_samples) == (2, 4)
    assert result.pass_at[2].value == 1.0
    assert 4 not in result.pass_at


def one_of_two_fails(draw: Draw) -> Group:
    lost = make_sample(None, status=Status.UNSCORED, episode=1)
    lost.cause = "reward/timeout"
    return make_group([[make_sample(1.0)], [lost]], draw.prompt.id)


@pytest.mark.parametrize(
    ("on_failure", "mean", "num_samples"), [("drop_sample", 1.0, 2), ("zero", 0.5, 4)]
)
def test_case_50_a_failed_reward_means_what_it_means_in_training(
    on_failure: OnFailure, mean: float, num_samples: int
) -> None:
    result = measure(prepare(FakeRunner(one_of_two_fails), on_failure=on_failure))
    assert result.reward is not None
    assert result.reward.value == mean
    assert result.num_samples == num_samples
    assert result.failures == {"reward/timeout": 2}


@pytest.mark.parametrize("on_failure", ["fail", "drop_group"])
def test_case_50_failures_that_leave_nothing_are_a_skipped_point(on_failure: OnFailure) -> None:
    result = measure(prepare(FakeRunner(one_of_two_fails), on_failure=on_failure))
    assert result.skipped is not None
    assert "reward/timeout" in result.skipped


def test_prompts_weigh_the_same_however_many_answers_were_scored() -> None:
    result = measure(prepare(rewards([1.0], [0.0, 0.0, 0.0]), samples_per_prompt=3))
    assert result.reward is not None
    assert result.reward.value == 0.5


def test_an_episode_of_several_samples_is_one_answer() -> None:
    cut = [make_sample(1.0), make_sample(1.0, row=1)]
    result = measure(prepare(FakeRunner(lambda _: make_group([cut])), 1, pass_at=[1]))
    assert result.num_samples == 1
    assert result.mean_tokens == 4.0
    assert result.pass_at[1].value == 1.0


def test_a_weighted_sum_that_misses_the_threshold_by_rounding_passes() -> None:
    almost = 0.7 + 0.2 + 0.1
    assert almost < 1
    result = measure(prepare(rewards([almost], [0.9]), pass_at=[1]))
    assert result.pass_at[1].value == 0.5
    lower = measure(prepare(rewards([almost], [0.9]), pass_at=[1], pass_threshold=0.5))
    assert lower.pass_at[1].value == 1.0


def test_metrics_of_a_result() -> None:
    result = measure(prepare(rewards([1.0, 0.0], [0.0, 0.0]), samples_per_prompt=2, pass_at=[2]))
    values = result.metrics().values()
    assert values.pop("time/eval/heldout") >= 0
    assert values["eval/heldout/reward"] == 0.25
    assert values["eval/heldout/reward/low"] < 0.25 < values["eval/heldout/reward/high"]
    assert values["eval/heldout/pass_at_2"] == 0.5
    assert values["eval/heldout/skipped"] == 0
    assert values["eval/heldout/samples"] == 4
    assert values == {k: v for k, v in measure_again(result).items() if k in values}


def test_every_metric_is_in_the_catalogue() -> None:
    result = measure(prepare(rewards([1.0, 0.0], [0.0, 0.0]), samples_per_prompt=2, pass_at=[2]))
    assert [name for name in result.metrics() if describe(name) is None] == []


def measure_again(result: EvalResult) -> dict[str, float]:
    """The same answers give the same numbers."""
    by_prompt = {group.prompt.id: group for group in result.groups}
    runner = FakeRunner(lambda draw: by_prompt[draw.prompt.id])
    return measure(prepare(runner, samples_per_prompt=2, pass_at=[2])).metrics().values()


def test_a_runner_that_raises_is_a_skipped_point_with_its_reason() -> None:
    def fail(draw: Draw) -> Group:
        raise OSError("disk\n full")

    result = measure(prepare(FakeRunner(fail)))
    assert result.skipped == "OSError: disk full"
    assert (result.step, result.version) == (20, 40)
    values = result.metrics().values()
    assert values.pop("time/eval/heldout") >= 0
    assert values == {"eval/heldout/skipped": 1}


def test_nothing_scored_is_a_skipped_point_that_names_the_causes() -> None:
    lost = make_sample(None, status=Status.UNSCORED)
    lost.cause = "reward/ZeroDivisionError"
    lost.detail = "division by zero (rewards.py:3)"
    result = measure(prepare(FakeRunner(lambda _: make_group([[lost]]))))
    assert result.skipped is not None
    assert "'heldout'" in result.skipped
    assert result.skipped.endswith(
        "was scored: 2 reward/ZeroDivisionError; "
        "the first: reward/ZeroDivisionError: division by zero (rewards.py:3)"
    )


def test_no_prompts_is_a_skipped_point() -> None:
    result = measure(prepare(rewards(), 0))
    assert result.skipped == "ConfigError: eval set 'heldout' has no prompts"


def test_a_trainable_answer_without_reward_is_a_skipped_point() -> None:
    result = measure(prepare(FakeRunner(lambda _: make_group([[make_sample(math.nan)]]))))
    assert result.skipped is not None
    assert "reward is nan" in result.skipped


class NeverEnds:
    def __init__(self) -> None:
        self.is_stopped = False

    async def collect(self, draws: Sequence[Draw], *, step: int) -> list[Group]:
        try:
            await asyncio.Event().wait()
        finally:
            self.is_stopped = True
        return []


def test_a_runner_that_takes_too_long_is_stopped() -> None:
    runner = NeverEnds()
    result = measure(prepare(runner), timeout_s=0.01)
    assert result.skipped == "DeadlineError: took longer than 0.01 s"
    assert runner.is_stopped


def test_a_runner_that_is_cancelled_by_another_hand_is_a_skipped_point() -> None:
    def cancel(draw: Draw) -> Group:
        raise asyncio.CancelledError

    assert measure(prepare(FakeRunner(cancel))).skipped == "EngineError: was cancelled"


def test_our_own_cancellation_goes_through_and_stops_the_runner() -> None:
    runner = NeverEnds()

    async def main() -> None:
        work = run_eval(prepare(runner), policy="policy", step=0, version=0, timeout_s=60)
        task = asyncio.create_task(work)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_failing_set_does_not_keep_the_next_from_running() -> None:
    def fail(draw: Draw) -> Group:
        raise RuntimeError("no")

    sets = [prepare(FakeRunner(fail), name="first"), prepare(rewards([1.0], [1.0]), name="second")]
    results = asyncio.run(run_evals(sets, policy="policy", step=1, version=1, timeout_s=60))
    assert [(r.name, r.skipped) for r in results] == [
        ("first", "RuntimeError: no"),
        ("second", None),
    ]
