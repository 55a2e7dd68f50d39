from __future__ import annotations

import pytest
from rollout_fakes import EOS, ids

from paceline.errors import RewardError, RolloutError
from paceline.rollout.filters import (
    all_failed,
    answer_lengths,
    drop_reason,
    is_zero_variance,
    longest_answer,
    mask_truncated,
    rewards_of,
    settle_failures,
    shape_overlong,
)
from paceline.rollout.settings import RolloutConfig
from paceline.types import NO_VERSION, Episode, Group, Prompt, Sample, Status


def sample(
    reward: float | None = 1.0,
    *,
    episode: int = 0,
    num_tokens: int = 3,
    status: Status = Status.COMPLETED,
    cause: str | None = None,
    finish: str = "stop",
    policy: str = "policy",
    role: str = "policy",
) -> Sample:
    prompt = ids("1+")
    return Sample(
        policy=policy,
        prompt_id="p",
        episode=episode,
        tokens=prompt + [EOS] * num_tokens,
        mask=[False] * 2 + [True] * num_tokens,
        logprobs=[0.0] * 2 + [-1.0] * num_tokens,
        versions=[NO_VERSION] * 2 + [3] * num_tokens,
        status=status,
        role=role,
        reward=reward,
        cause=cause,
        detail="it broke" if cause else "",
        finish=finish,
    )


def group(*samples: Sample) -> Group:
    return Group(Prompt(id="p"), [Episode("p", i, [s]) for i, s in enumerate(samples)])


def unscored(cause: str = "reward/timeout", **fields: object) -> Sample:
    return sample(None, status=Status.UNSCORED, cause=cause, **fields)  # type: ignore[arg-type]


def test_drop_sample_keeps_the_siblings() -> None:
    """Case 50."""
    g = group(sample(1.0), unscored(), sample(0.0))
    assert settle_failures(g, "drop_sample") is None
    assert rewards_of(g, "policy") == [1.0, 0.0]


def test_drop_group_drops_all_of_it() -> None:
    """Case 50."""
    assert settle_failures(group(sample(1.0), unscored()), "drop_group") == "failed"
    assert settle_failures(group(sample(1.0), sample(0.0)), "drop_group") is None


def test_a_group_without_a_trainable_sample_is_dropped() -> None:
    assert settle_failures(group(unscored(), unscored()), "drop_sample") == "failed"


def test_zero_makes_a_failed_answer_worth_nothing() -> None:
    """Case 50."""
    g = group(
        unscored(), unscored(finish="length"), sample(None, status=Status.FAILED, cause="env/X")
    )
    assert settle_failures(g, "zero") is None
    assert [(s.reward, s.status) for s in g.samples()] == [
        (0.0, Status.COMPLETED),
        (0.0, Status.TRUNCATED),
        (0.0, Status.COMPLETED),
    ]
    assert [s.cause for s in g.samples()] == ["reward/timeout", "reward/timeout", "env/X"]


def test_zero_is_not_for_what_was_not_served_or_not_answered() -> None:
    """Case 51."""
    aborted = sample(None, status=Status.ABORTED, cause="engine/abort")
    refused = sample(None, status=Status.FAILED, cause="engine/refused")
    silent = sample(None, status=Status.FAILED, cause="env/X", num_tokens=0)
    g = group(aborted, refused, silent, sample(1.0))
    assert settle_failures(g, "zero") is None
    assert [e.is_trainable for e in g.episodes] == [False, False, False, True]


def test_fail_ends_the_run_with_prompt_cause_and_detail() -> None:
    """Case 50."""
    with pytest.raises(RewardError, match=r"prompt 'p', episode 0: reward/timeout: it broke"):
        settle_failures(group(sample(1.0), unscored()), "fail")
    with pytest.raises(RolloutError, match="env/LookupError"):
        settle_failures(group(unscored("env/LookupError")), "fail")


@pytest.mark.parametrize("on_failure", ["fail", "drop_group"])
def test_what_the_engine_did_not_serve_is_no_failure_of_the_reward(on_failure: str) -> None:
    g = group(sample(1.0), sample(None, status=Status.ABORTED, cause="engine/abort"))
    assert settle_failures(g, on_failure) is None  # type: ignore[arg-type]


def test_the_error_when_everything_failed_counts_the_causes() -> None:
    groups = [group(unscored(), unscored(), unscored("reward/ValueError"))]
    error = all_failed(groups, 4)
    assert isinstance(error, RewardError)
    assert "step 4: all 3 samples failed: 2 reward/timeout, 1 reward/ValueError" in str(error)
    assert "it broke" in str(error)


def overlong(**fields: object) -> RolloutConfig:
    return RolloutConfig.model_validate(
        {
            "sampling": {"max_tokens": 100},
            "overlong_penalty": 0.5,
            "overlong_window": 40,
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(10, 0.0), (60, 0.0), (70, -0.125), (80, -0.25), (100, -0.5)]
)
def test_overlong_penalty_rises_linearly(num_tokens: int, penalty: float) -> None:
    """Case 35, the part of an answer without an end."""
    g = group(sample(1.0, num_tokens=num_tokens))
    shape_overlong(g, overlong())
    (s,) = g.samples()
    assert s.reward == 1.0 + penalty
    assert s.reward_parts == {"overlong": penalty}
    assert str(s.reward_parts["overlong"]) != "-0.0"


def test_overlong_is_off_by_default_and_leaves_unscored_samples_alone() -> None:
    g = group(sample(1.0, num_tokens=256), unscored(num_tokens=256))
    shape_overlong(g, RolloutConfig())
    assert [s.reward_parts for s in g.samples()] == [{}, {}]
    shape_overlong(g, overlong())
    assert [s.reward for s in g.samples()] == [0.5, None]


def test_answers_are_the_runs_of_the_mask() -> None:
    s = sample()
    s.mask = [False, True, True, False, True]
    assert list(answer_lengths([s])) == [2, 1]
    assert longest_answer(Episode("p", 0, [s, sample(num_tokens=7)]), "policy") == 7
    assert longest_answer(Episode("p", 0, []), "policy") == 0


def test_zero_variance_is_per_role_and_over_trainable_episodes() -> None:
    assert is_zero_variance(group(sample(0.1), sample(0.1), sample(0.1)), "policy")
    assert is_zero_variance(group(sample(1.0), unscored()), "policy")
    assert not is_zero_variance(group(sample(1.0), sample(0.0)), "policy")
    two_roles = Group(
        Prompt(id="p"),
        [Episode("p", i, [sample(1.0, role="white"), sample(0.0, role="black")]) for i in range(2)],
    )
    assert is_zero_variance(two_roles, "policy")
    assert rewards_of(two_roles, "policy", "white") == [1.0, 1.0]


def test_rewards_of_an_episode_of_several_rows_count_once() -> None:
    rows = Episode("p", 0, [sample(0.5), sample(0.5)])
    assert rewards_of(Group(Prompt(id="p"), [rows]), "policy") == [0.5]


def test_only_dynamic_sampling_drops_equal_rewards() -> None:
    g = group(sample(1.0), sample(1.0))
    assert drop_reason(g, "policy", RolloutConfig()) is None
    assert drop_reason(g, "policy", RolloutConfig(dynamic_sampling=True)) == "zero_variance"


def test_masking_cuts_all_columns_of_truncated_samples_together() -> None:
    """Case 44."""
    g = group(sample(1.0, status=Status.TRUNCATED), sample(0.0))
    mask_truncated(g)
    cut, kept = g.samples()
    cut.validate()
    assert (cut.num_trained_tokens, set(cut.logprobs), set(cut.versions)) == (
        0,
        {0.0},
        {NO_VERSION},
    )
    assert (cut.reward, cut.status) == (1.0, Status.TRUNCATED)
    assert kept.num_trained_tokens == 3
