"""RLOO on numbers worked out by hand."""

import pytest
import torch
from batches import group_of, inputs_of, make_group, make_sample

from paceline.algorithms.advantages import leave_one_out
from paceline.algorithms.base import Scores
from paceline.algorithms.rloo import Rloo
from paceline.errors import TrainerError
from paceline.types import Group


def two_answers() -> list[Group]:
    """Rewards 1 and 0; the first answer has one trained token, the second has two."""
    first = make_sample(1.0, [False, True])
    second = make_sample(0.0, [False, True, True], episode=1)
    return [make_group([[first], [second]])]


def test_case_25_three_of_eight_correct() -> None:
    credit = Rloo().credit([group_of([1.0] * 3 + [0.0] * 5)], "policy")
    found = [column[-1] for column in credit.advantages]
    assert found == pytest.approx([0.71429] * 3 + [-0.42857] * 5, abs=5e-6)
    assert sum(found) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.1, 0.35, 1e6])
def test_case_27_equal_rewards_give_exactly_zero(value: float) -> None:
    assert leave_one_out([value] * 8) == [0.0] * 8


def test_case_28_one_answer_has_nothing_to_be_compared_with() -> None:
    assert Rloo().min_group_size == 2
    credit = Rloo().credit([group_of([5.0])], "policy")
    assert credit.advantages == [[0.0, 0.0, 0.0]]
    assert credit.metrics.values()["train/small_groups"] == 1


def test_the_baseline_does_not_depend_on_the_answer_itself() -> None:
    for own in (-3.0, 0.0, 8.0):
        advantage = leave_one_out([own, 1.0, 2.0])[0]
        assert advantage == pytest.approx(own - 1.5)


def test_kl_in_the_reward_is_summed_over_an_answer() -> None:
    """R = 1 - 0.1 * 0.5 and 0 - 0.1 * (0.2 - 0.4): 0.95 and 0.02."""
    scores = Scores(
        old_logprobs=[[0, -1.0], [0, -1.0, -1.0]], reference_logprobs=[[0, -1.5], [0, -1.2, -0.6]]
    )
    credit = Rloo(kl_coef=0.1).credit(two_answers(), "policy", scores)
    assert credit.advantages[0] == pytest.approx([0, 0.93])
    assert credit.advantages[1] == pytest.approx([0, -0.93, -0.93])
    assert credit.metrics.values()["train/kl_reward"] == pytest.approx(0.1)


def test_kl_is_taken_off_the_reward_or_added_to_the_loss_never_both() -> None:
    in_reward, in_loss = Rloo(kl_coef=0.1), Rloo(kl_coef=0.1, kl_in="loss")
    assert in_reward.needs_reference
    assert in_loss.needs_reference
    assert in_reward.needs_old_logprobs
    assert not in_loss.needs_old_logprobs
    logprobs = torch.tensor([-1.0], dtype=torch.float64)
    inputs = inputs_of(logprobs, reference=[-1.5])
    assert in_reward.loss(inputs).loss.item() == 0
    assert in_loss.loss(inputs).loss.item() == pytest.approx(0.1 * 0.5)
    credit = in_loss.credit(two_answers(), "policy")
    assert credit.advantages[0] == [0, 1.0]


@pytest.mark.parametrize("scores", [None, Scores(), Scores(old_logprobs=[[0, 0], [0, 0, 0]])])
def test_a_kl_in_the_reward_without_its_log_probs_is_refused(scores: Scores | None) -> None:
    with pytest.raises(TrainerError, match=r"credit of rloo.*_logprobs"):
        Rloo(kl_coef=0.1).credit(two_answers(), "policy", scores)


def test_the_first_update_is_that_of_reinforce() -> None:
    """With a constant of 1 the gradient is that of the sum over an answer's tokens."""
    algorithm = Rloo(loss_mean="constant", constant_tokens=1)
    weights = algorithm.token_weights(two_answers(), "policy")
    assert weights == [[0, 0.5], [0, 0.5, 0.5]]
    logprobs = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    inputs = inputs_of(logprobs, advantages=[1.0, -1.0, -1.0], weights=[0.5, 0.5, 0.5])
    algorithm.loss(inputs).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, 0.5, 0.5]
