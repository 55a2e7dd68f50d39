"""RLOO: REINFORCE with a leave-one-out baseline. arXiv 2402.14740, section 3.3.

An answer's baseline is the mean reward of the other answers to its prompt in its role, which does
not depend on it, so the gradient has no bias; nothing is divided by a standard deviation:

    R_i = r_i - kl_coef sum_t KL_t                 kl_in = "reward", t over the episode's tokens
    A_i = R_i - mean of R_j over the other episodes j              baseline = "leave_one_out"
    A_i = R_i - mean of the role's earlier R                       baseline = "running"

The latter is REINFORCE with the baseline of `paceline.algorithms.running_baseline`, which works
with one answer a prompt, and for roles that each prompt meets once.

The loss is the clipped surrogate of `paceline.algorithms.clipping` per token. At the first update
of a rollout its gradient is that of REINFORCE. The paper sums over the tokens of an answer:
loss_mean = "constant" with constant_tokens = 1 (or any other constant, and a learning rate to it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from paceline.algorithms.advantages import leave_one_out
from paceline.algorithms.base import Credit, LossInputs, LossOutput, Scores
from paceline.algorithms.clipping import Clipped
from paceline.algorithms.group_credit import (
    compare_groups,
    count_episodes,
    episode_credit,
    penalised,
)
from paceline.algorithms.kl import bounded_ratio, log_ratio
from paceline.algorithms.policy_gradient import policy_gradient_loss
from paceline.algorithms.reward_kl import RewardKl
from paceline.algorithms.running_baseline import RunningBaseline
from paceline.algorithms.trajectories import trajectories
from paceline.types import Group


class Rloo(RewardKl, RunningBaseline, Clipped):
    """`[algorithm]` with kind rloo: an answer's reward against the mean of the others'."""

    kind: Literal["rloo"] = "rloo"
    """Which algorithm: `rloo` compares an answer with the mean of the other answers."""
    baseline: Literal["leave_one_out", "running"] = "leave_one_out"
    """What a reward is compared with: `leave_one_out`, the mean of the prompt's other answers in
    the same role; `running`, the mean of what the role earned before, over all prompts: one answer
    a prompt will do, and a prompt's difficulty counts as luck."""

    @property
    def min_group_size(self) -> int:
        return 1 if self.baseline == "running" else 2

    def credit(self, groups: Sequence[Group], policy: str, scores: Scores | None = None) -> Credit:
        """Every trained token of an episode gets the episode's advantage."""
        metrics = count_episodes(groups, policy)
        penalties = self.penalties(groups, policy, scores, metrics)
        paths = trajectories(groups, policy)
        rewards = penalised(paths, penalties)
        if self.baseline == "leave_one_out":
            found = compare_groups(groups, policy, paths, rewards, leave_one_out, metrics)
            return episode_credit(groups, policy, paths, found, metrics)
        found, after = self.compare_with_past(paths, rewards, scores, metrics)
        credit = episode_credit(groups, policy, paths, found, metrics)
        credit.baselines = after
        return credit

    def loss(self, inputs: LossInputs) -> LossOutput:
        ratio_N = bounded_ratio(log_ratio(inputs.logprobs_N, inputs.old_logprobs_N))
        surrogate_N, means = self.surrogate(ratio_N, inputs.advantages_N)
        return policy_gradient_loss(self, inputs, surrogate_N, means)
