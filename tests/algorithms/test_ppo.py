"""PPO's credit on numbers worked out by hand."""

import math

import pytest
import torch
from batches import group_of, inputs_of, make_group, make_sample
from pydantic import ValidationError

from paceline.algorithms.base import Scores
from paceline.algorithms.critic import ValueObjective
from paceline.algorithms.ppo import Ppo
from paceline.algorithms.trajectories import discounted_returns, gae, terminal_rewards
from paceline.errors import RewardError, TrainerError
from paceline.types import Group, Status

PLAIN = {"whiten_advantages": False}


def answer(reward: float = 0.0, mask: tuple[bool, ...] = (False, True, True)) -> list[Group]:
    return [make_group([[make_sample(reward, mask)]])]


def test_gae_of_two_tokens() -> None:
    """delta_2 = 1 - 0.5, delta_1 = 0.9 * 0.5 - 0.2; A_1 = delta_1 + 0.9 * 0.8 * delta_2."""
    found = gae([0.0, 1.0], [0.2, 0.5], gamma=0.9, gae_lambda=0.8)
    assert found == pytest.approx([0.25 + 0.72 * 0.5, 0.5])


def test_gae_with_lambda_1_is_the_return_minus_the_value() -> None:
    rewards, values = [0.1, -0.3, 2.0], [0.5, 0.4, -0.2]
    returns = discounted_returns(rewards, 0.9)
    found = gae(rewards, values, gamma=0.9, gae_lambda=1.0)
    assert found == pytest.approx([g - v for g, v in zip(returns, values, strict=True)])


def test_gae_with_lambda_0_is_the_one_step_error() -> None:
    found = gae([0.0, 1.0], [0.2, 0.5], gamma=1.0, gae_lambda=0.0)
    assert found == pytest.approx([0.3, 0.5])


@pytest.mark.parametrize(
    ("status", "bootstrap", "advantages"),
    [
        (Status.TRUNCATED, True, [0.0, 0.0]),
        (Status.TRUNCATED, False, [-0.5, -0.5]),
        (Status.COMPLETED, True, [-0.5, -0.5]),
        (Status.COMPLETED, False, [-0.5, -0.5]),
    ],
)
def test_case_34_bootstrap_at_truncation(
    status: Status, bootstrap: bool, advantages: list[float]
) -> None:
    groups = [make_group([[make_sample(0.0, [False, True, True], status=status)]])]
    scores = Scores(values=[[0, 0.5, 0.5]], final_values=[0.5])
    algorithm = Ppo(bootstrap_truncated=bootstrap, **PLAIN)
    credit = algorithm.credit(groups, "policy", scores)
    assert credit.advantages == [[0, *advantages]]
    assert credit.returns == [[0, *(a + 0.5 for a in advantages)]]
    assert algorithm.needs_final_values == bootstrap


def test_case_34_the_last_row_says_whether_an_episode_was_cut_off() -> None:
    """Its value at the end counts, not that of a row before it, nor of one without tokens."""
    cut = [
        make_sample(0.0, [False, True]),
        make_sample(0.0, [False, True], row=1, status=Status.TRUNCATED),
        make_sample(0.0, [False, False], row=2),
    ]
    scores = Scores(values=[[0, 0.0], [0, 0.0], [0, 0]], final_values=[7.0, 0.5, 9.0])
    algorithm = Ppo(bootstrap_truncated=True, **PLAIN)
    credit = algorithm.credit([make_group([cut])], "policy", scores)
    assert credit.advantages == [[0, 0.5], [0, 0.5], [0, 0]]
    cut[0].status, cut[1].status = Status.TRUNCATED, Status.COMPLETED
    credit = algorithm.credit([make_group([cut])], "policy", scores)
    assert credit.advantages == [[0, 0.0], [0, 0.0], [0, 0]]


def test_case_35_the_reward_is_that_of_the_last_trained_token() -> None:
    """[prompt, t0, t1, EOS, PAD, PAD]: the reward stands at the end token."""
    groups = answer(1.0, (False, True, True, True, False, False))
    scores = Scores(values=[[0.0] * 6])
    credit = Ppo(gamma=0.5, gae_lambda=1.0, **PLAIN).credit(groups, "policy", scores)
    assert credit.advantages == [[0, 0.25, 0.5, 1.0, 0, 0]]
    assert terminal_rewards(1.0, [0.0, 0.25]) == [0.0, 0.75]
    assert terminal_rewards(1.0, []) == []


def test_tokens_of_a_tool_are_no_steps() -> None:
    """Values at untrained positions are not read, and nothing is discounted over them."""
    groups = answer(1.0, (False, True, False, False, True))
    scores = Scores(values=[[9, 0.2, 9, 9, 0.5]])
    credit = Ppo(gamma=0.9, gae_lambda=0.8, **PLAIN).credit(groups, "policy", scores)
    assert credit.advantages[0] == pytest.approx([0, 0.25 + 0.72 * 0.5, 0, 0, 0.5])
    assert credit.returns is not None
    assert credit.returns[0] == pytest.approx([0, 0.2 + 0.25 + 0.72 * 0.5, 0, 0, 1.0])


def test_case_32_the_rows_of_an_episode_are_one_trajectory() -> None:
    cut = [make_sample(1.0, [False, True]), make_sample(1.0, [False, True, True], row=1)]
    whole = answer(1.0, (False, True, True, True))
    settings = {"gamma": 0.9, "gae_lambda": 0.7, **PLAIN}
    one = Ppo(**settings).credit(whole, "policy", Scores(values=[[0, 0.1, 0.2, 0.3]]))
    two = Ppo(**settings).credit(
        [make_group([cut])], "policy", Scores(values=[[0, 0.1], [0, 0.2, 0.3]])
    )
    assert [*two.advantages[0][1:], *two.advantages[1][1:]] == one.advantages[0][1:]


def test_roles_are_trajectories_of_their_own() -> None:
    played = [make_sample(1.0, [False, True], role="a"), make_sample(-2.0, [False, True], role="b")]
    credit = Ppo(**PLAIN).credit([make_group([played])], "policy", Scores(values=[[0, 0], [0, 0]]))
    assert credit.advantages == [[0, 1.0], [0, -2.0]]


def test_kl_in_the_reward_is_taken_off_token_by_token() -> None:
    scores = Scores(
        old_logprobs=[[0, -1.0, -1.0]],
        reference_logprobs=[[0, -1.5, -0.5]],
        values=[[0, 0.0, 0.0]],
    )
    credit = Ppo(kl_coef=0.1, **PLAIN).credit(answer(1.0), "policy", scores)
    assert credit.returns is not None
    assert credit.returns[0] == pytest.approx([0, 1.0, 1.05])
    assert credit.metrics.values()["train/kl_reward"] == pytest.approx(0.0)


def test_case_38_whitening_over_trained_tokens_leaves_returns_alone() -> None:
    groups = [group_of([1.0, 0.0], mask=(False, True, False))]
    scores = Scores(values=[[0, 0.5, 7], [0, 0.5, 7]])
    credit = Ppo().credit(groups, "policy", scores)
    half = pytest.approx(math.sqrt(0.5), abs=1e-6)
    assert credit.advantages[0] == [0, half, 0]
    assert credit.advantages[1][1] == -credit.advantages[0][1]
    assert credit.returns == [[0, 1.0, 0], [0, 0.0, 0]]


def test_case_38_a_single_trained_token_is_finite() -> None:
    credit = Ppo().credit(answer(3.0, (False, True)), "policy", Scores(values=[[0, 0.5]]))
    assert credit.advantages == [[0, 0.0]]


def test_case_31_and_51_lost_episodes_are_in_no_mean() -> None:
    lost = make_group([[make_sample(None, status=Status.FAILED)]])
    groups = [group_of([1.0, 0.0], mask=(False, True))]
    values = [[0, 0.1], [0, 0.2]]
    plain = Ppo().credit(groups, "policy", Scores(values=values))
    more = Ppo().credit([*groups, lost], "policy", Scores(values=[*values, [0, 0, 0]]))
    assert more.advantages == [*plain.advantages, [0, 0, 0]]
    assert more.metrics.values()["train/untrainable_episodes"] == 1
    with pytest.raises(RewardError, match="unscored"):
        Ppo().credit([make_group([[make_sample(None)]])], "policy", Scores(values=[[0, 0, 0]]))


def test_case_12_a_rollout_without_trained_tokens() -> None:
    masked = group_of([1.0, 0.0], mask=(False, False), status=Status.TRUNCATED)
    scores = Scores(values=[[0, 0]] * 2, final_values=[0, 0])
    credit = Ppo(bootstrap_truncated=True).credit([masked], "policy", scores)
    assert credit.advantages == credit.returns == [[0.0, 0.0]] * 2
    assert all(map(math.isfinite, credit.metrics.values().values()))


def test_explained_variance() -> None:
    """Returns 0 and 2; the critic is exact, blind, or exactly wrong."""
    groups = [group_of([0.0, 2.0], mask=(False, True))]
    for values, expected in (([0.0, 2.0], 1.0), ([1.0, 1.0], 0.0), ([2.0, 0.0], -3.0)):
        scores = Scores(values=[[0, v] for v in values])
        metrics = Ppo().credit(groups, "policy", scores).metrics.values()
        assert metrics["critic/explained_variance"] == pytest.approx(expected)
        assert metrics["train/return"] == 1.0


def test_a_nan_value_is_not_hidden() -> None:
    groups = [group_of([1.0, 0.0], mask=(False, True))]
    credit = Ppo().credit(groups, "policy", Scores(values=[[0, math.nan], [0, 0.0]]))
    assert math.isnan(credit.advantages[0][1])
    assert math.isnan(credit.advantages[1][1])


@pytest.mark.parametrize(
    ("settings", "scores", "column"),
    [
        ({}, None, "values"),
        ({"bootstrap_truncated": True}, Scores(values=[[0, 0, 0]]), "final_values"),
        ({"kl_coef": 0.1}, Scores(values=[[0, 0, 0]]), "old_logprobs"),
    ],
)
def test_a_missing_column_is_named(
    settings: dict[str, object], scores: Scores | None, column: str
) -> None:
    groups = [make_group([[make_sample(1.0, status=Status.TRUNCATED)]])]
    with pytest.raises(TrainerError, match=f"credit of ppo.* {column}"):
        Ppo(**settings).credit(groups, "policy", scores)


def test_the_policy_loss_is_the_clipped_surrogate() -> None:
    logprobs = torch.tensor([math.log(1.5), math.log(1.1)], dtype=torch.float64)
    output = Ppo().loss(inputs_of(logprobs, old=[0.0, 0.0], advantages=[1.0, 1.0]))
    assert output.loss.item() == pytest.approx(-(1.2 + 1.1) / 2)


def test_what_it_asks_for() -> None:
    assert Ppo().critic == ValueObjective(0.2)
    assert Ppo(value_clip=None).critic == ValueObjective(None)
    assert Ppo().min_group_size == 1
    assert not Ppo().needs_old_logprobs
    assert Ppo(kl_coef=0.1).needs_old_logprobs
    for wrong in ({"gamma": 1.1}, {"gae_lambda": -0.1}, {"value_clip": 0.0}):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            Ppo(**wrong)
