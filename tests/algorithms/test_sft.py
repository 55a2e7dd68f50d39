"""Supervised training's loss and credit."""

import pytest
import torch
from batches import group_of, inputs_of, make_group, make_sample
from pydantic import ValidationError

from paceline.algorithms.sft import Sft
from paceline.types import Status


def test_loss_and_gradient_are_those_of_the_negative_log_likelihood() -> None:
    logprobs = torch.tensor([-1.0, -3.0], dtype=torch.float64, requires_grad=True)
    output = Sft().loss(inputs_of(logprobs, weights=[0.25, 0.75]))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(2.5)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.25, -0.75]
    total, weight = output.means["nll"]
    assert (total / weight).item() == 2.0
    assert set(output.means) == {"nll"}


def test_case_12_no_tokens() -> None:
    logprobs = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    output = Sft().loss(inputs_of(logprobs))
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert [v.item() for v in output.means["nll"]] == [0.0, 0.0]


def test_entropy_is_shown_where_the_trainer_gives_it() -> None:
    entropy = torch.tensor([0.5, 1.5], dtype=torch.float64)
    output = Sft().loss(inputs_of(torch.zeros(2, dtype=torch.float64), entropy=entropy))
    assert [v.item() for v in output.means["entropy"]] == [2.0, 2.0]


def test_credit_is_one_where_tokens_are_learned() -> None:
    lost = make_sample(None, episode=0, status=Status.FAILED)
    groups = [
        group_of([0.0]),
        make_group([[make_sample(None, [False, False])]]),
        make_group([[lost]]),
    ]
    credit = Sft().credit(groups, "policy")
    assert credit.advantages == [[0, 1, 1], [0, 0], [0, 0, 0]]
    values = credit.metrics.values()
    assert values["train/masked_episodes"] == 1
    assert values["train/untrainable_episodes"] == 1


def test_what_it_asks_for() -> None:
    sft = Sft()
    assert not sft.learns_from_rollouts
    assert not sft.needs_reward
    assert {sft.needs_reference, sft.needs_teacher, sft.needs_entropy_gradient} == {False}
    assert {sft.needs_old_logprobs, sft.needs_final_values} == {False}
    assert sft.critic is None
    assert sft.min_group_size == 1
    with pytest.raises(ValidationError, match="loss_mean"):
        Sft(loss_mean="constant")
