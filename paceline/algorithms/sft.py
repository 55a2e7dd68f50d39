"""Supervised fine-tuning: raise the log-probability of given tokens.

    loss_t = -log pi(token_t | tokens before t)
    loss   = sum_t weight_t loss_t                 weight: see paceline.algorithms.reductions

Samples come straight from the data set; the mask says which tokens are to be learned. There is
nothing to credit: the advantages are 1 on trained tokens and are not read by the loss.

Legend: N trainable tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from paceline.algorithms.base import Credit, LossInputs, LossOutput, Objective, Scores
from paceline.algorithms.group_credit import count_episodes
from paceline.algorithms.kl import token_mean
from paceline.algorithms.reductions import token_weights
from paceline.types import Config, Group


class Sft(Config):
    """`[algorithm]` with kind sft: learn given answers."""

    kind: Literal["sft"] = "sft"
    """Which algorithm: `sft` learns the answers of the data set."""
    loss_mean: Literal["token", "episode"] = "token"
    """Mean of the loss: `token` gives every token, `episode` every answer the same say."""

    learns_from_rollouts: ClassVar[bool] = False
    needs_reward: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    needs_old_logprobs: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = False
    teacher_top_k: ClassVar[int] = 0
    needs_entropy_gradient: ClassVar[bool] = False
    learns_by_advantage_alone: ClassVar[bool] = False
    critic: ClassVar[Objective | None] = None
    needs_final_values: ClassVar[bool] = False
    min_group_size: ClassVar[int] = 1

    def credit(self, groups: Sequence[Group], policy: str, scores: Scores | None = None) -> Credit:
        columns = [
            [float(trained and episode.is_trainable) for trained in sample.mask]
            for group in groups
            for episode in group.episodes
            for sample in episode.samples
            if sample.policy == policy
        ]
        return Credit(columns, metrics=count_episodes(groups, policy))

    def token_weights(self, groups: Sequence[Group], policy: str) -> list[list[float]]:
        return token_weights(groups, policy, self.loss_mean)

    def loss(self, inputs: LossInputs) -> LossOutput:
        means = {"nll": token_mean(-inputs.logprobs_N)}
        if inputs.entropy_N is not None:
            means["entropy"] = token_mean(inputs.entropy_N)
        return LossOutput(-(inputs.weights_N * inputs.logprobs_N).sum(), means)
