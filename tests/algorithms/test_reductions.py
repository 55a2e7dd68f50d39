"""Loss means: one global denominator, counted in trained tokens and episodes."""

import pytest
import torch
from batches import inputs_of, make_group, make_sample

from paceline.algorithms.grpo import Grpo
from paceline.algorithms.reductions import LossMean, token_share, token_weights
from paceline.algorithms.sft import Sft
from paceline.types import Group, Status


def groups_of(*lengths: int, status: Status = Status.COMPLETED) -> list[Group]:
    """A group per length, with one episode of that many trained tokens."""
    return [
        make_group([[make_sample(1.0, [False] + [True] * n, prompt_id=f"p{i}", status=status)]])
        for i, n in enumerate(lengths)
    ]


def weighted_loss(groups: list[Group], losses: list[list[float]], mode: LossMean) -> float:
    weights = token_weights(groups, "policy", mode)
    return sum(
        w * x
        for row_weights, row_losses in zip(weights, losses, strict=True)
        for w, x in zip(row_weights[1:], row_losses, strict=True)
    )


def test_case_1_token_and_episode_mean_of_uneven_rows() -> None:
    losses = [[2.0] * 5, [10.0]]
    assert weighted_loss(groups_of(5, 1), losses, "token") == pytest.approx(20 / 6)
    assert weighted_loss(groups_of(5, 1), losses, "episode") == pytest.approx(6.0)


@pytest.mark.parametrize("split", [[[0, 1]], [[0], [1]], [[1], [0]]])
def test_case_2_every_split_into_micro_batches_has_the_same_loss(split: list[list[int]]) -> None:
    weights = token_weights(groups_of(5, 1), "policy", "token")
    losses = [[1.0] * 5, [3.0]]
    total = 0.0
    for rows in split:
        logprobs = torch.tensor([-x for r in rows for x in losses[r]], dtype=torch.float64)
        picked = [w for r in rows for w in weights[r][1:]]
        total += Sft().loss(inputs_of(logprobs, weights=picked)).loss.item()
    assert total == pytest.approx(4 / 3)


def test_case_5_accumulating_four_micro_batches_gives_the_whole_gradient() -> None:
    weights = token_weights(groups_of(3, 1, 4, 2), "policy", "token")
    whole = torch.full((10,), -1.0, dtype=torch.float64, requires_grad=True)
    flat = [w for row in weights for w in row if w]
    Sft().loss(inputs_of(whole, weights=flat)).loss.backward()
    split = torch.full((10,), -1.0, dtype=torch.float64, requires_grad=True)
    for part in (slice(0, 3), slice(3, 4), slice(4, 8), slice(8, 10)):
        Sft().loss(inputs_of(split[part], weights=flat[part])).loss.backward()
    assert whole.grad is not None
    assert torch.equal(whole.grad, torch.full((10,), -0.1, dtype=torch.float64))
    assert split.grad is not None
    assert torch.equal(split.grad, whole.grad)


@pytest.mark.parametrize("mode", ["token", "episode", "constant"])
def test_case_7_rows_without_trained_tokens_change_no_weight(mode: LossMean) -> None:
    groups = groups_of(5, 1)
    before = token_weights(groups, "policy", mode, 8)
    groups += groups_of(0, 0) + groups_of(9, status=Status.FAILED)
    groups[0].episodes[0].samples.append(make_sample(1.0, [False] * 4, row=1))
    after = token_weights(groups, "policy", mode, 8)
    assert [row for row in after if any(row)] == before
    assert sum(not any(row) for row in after) == 4


@pytest.mark.parametrize(
    ("mode", "given", "absent"),
    [
        ("token", {}, "num_tokens"),
        ("token", {"num_tokens": 0}, "num_tokens"),
        ("episode", {"num_episodes": 2}, "episode_tokens"),
        ("episode", {"episode_tokens": 2}, "num_episodes"),
        ("constant", {"constant_tokens": 8}, "num_episodes"),
        ("constant", {"num_episodes": 2}, "constant_tokens"),
    ],
)
def test_case_8_a_mode_without_its_denominator_is_refused(
    mode: LossMean, given: dict[str, int], absent: str
) -> None:
    with pytest.raises(ValueError, match=f"{mode}.*{absent}"):
        token_share(mode, **given)


def test_case_8_the_constant_of_a_batch_is_never_made_up() -> None:
    with pytest.raises(ValueError, match=r"constant.*constant_tokens"):
        token_weights(groups_of(3), "policy", "constant")


def test_case_10_say_of_a_short_and_a_long_answer() -> None:
    groups = groups_of(10, 1000)
    by_token = [sum(row) for row in token_weights(groups, "policy", "token")]
    assert by_token == [pytest.approx(10 / 1010), pytest.approx(1000 / 1010)]
    assert by_token == [pytest.approx(0.0099, abs=5e-5), pytest.approx(0.9901, abs=5e-5)]
    by_episode = [sum(row) for row in token_weights(groups, "policy", "episode")]
    assert by_episode == [pytest.approx(0.5), pytest.approx(0.5)]


@pytest.mark.parametrize("mode", ["token", "episode", "constant"])
def test_case_12_a_batch_without_trained_tokens_has_weights_of_zero(mode: LossMean) -> None:
    assert token_weights(groups_of(0, 0), "policy", mode, 8) == [[0.0], [0.0]]
    assert token_weights([], "policy", mode, 8) == []


def test_case_32_an_episode_cut_into_rows_counts_once() -> None:
    cut = make_group(
        [
            [make_sample(0.0, [False, True, True], row=0), make_sample(0.0, [False, True], row=1)],
            [make_sample(1.0, [False, True], episode=1)],
        ]
    )
    episode = token_weights([cut], "policy", "episode")
    assert episode == [[0, 1 / 6, 1 / 6], [0, 1 / 6], [0, 1 / 2]]
    token = token_weights([cut], "policy", "token")
    assert token == [[0, 1 / 4, 1 / 4], [0, 1 / 4], [0, 1 / 4]]
    constant = token_weights([cut], "policy", "constant", 10)
    assert constant == [[0, 1 / 20, 1 / 20], [0, 1 / 20], [0, 1 / 20]]


def test_two_draws_of_one_prompt_are_two_episodes() -> None:
    groups = [make_group([[make_sample(1.0)]], draw=d) for d in (0, 1)]
    assert token_weights(groups, "policy", "episode") == [[0, 1 / 4, 1 / 4]] * 2


def test_tokens_of_another_policy_do_not_count() -> None:
    both = make_group([[make_sample(1.0), make_sample(1.0, [False] + [True] * 7, policy="other")]])
    assert token_weights([both], "policy", "token") == [[0, 1 / 2, 1 / 2]]


def test_the_algorithms_use_the_mean_that_they_are_told() -> None:
    groups = groups_of(1, 3)
    assert Grpo().token_weights(groups, "policy")[0] == [0, 1 / 4]
    assert Grpo(loss_mean="episode").token_weights(groups, "policy")[0] == [0, 1 / 2]
    constant = Grpo(loss_mean="constant", constant_tokens=5)
    assert constant.token_weights(groups, "policy")[0] == [0, 1 / 10]
    assert Sft().token_weights(groups, "policy")[0] == [0, 1 / 4]
    assert Sft(loss_mean="episode").token_weights(groups, "policy")[0] == [0, 1 / 2]
