"""REINFORCE++: returns of token-level rewards, whitened over the rollout. arXiv 2501.03262.

    r_t = -kl_coef KL_t + [t is the last trained token] R    kl_in = "reward"
    G_t = r_t + gamma G_{t+1}
    A_t = (G_t - mean(G)) / (std(G) + 1e-6)                  all trained tokens of the rollout

    R = reward                                               baseline = "none"
    R = reward - mean reward of the prompt's episodes        baseline = "group"
    R = reward - mean of the role's earlier rewards          baseline = "running"

With a group baseline several answers a prompt are needed, and a prompt's difficulty does not count;
without one a single answer will do. A running baseline (`paceline.algorithms.running_baseline`)
brings roles with different rewards to one level before they are whitened together. A KL in the
reward adds up over the tokens that follow, as every reward does. The loss is the clipped surrogate
of `paceline.algorithms.clipping` per token.

Legend: T trained tokens of an episode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from paceline.algorithms.advantages import centred
from paceline.algorithms.base import Credit, LossInputs, LossOutput, Scores
from paceline.algorithms.clipping import Clipped
from paceline.algorithms.group_credit import compare_groups, count_episodes
from paceline.algorithms.kl import bounded_ratio, log_ratio
from paceline.algorithms.policy_gradient import policy_gradient_loss
from paceline.algorithms.reward_kl import RewardKl
from paceline.algorithms.running_baseline import RunningBaseline
from paceline.algorithms.trajectories import (
    discounted_returns,
    empty_columns,
    terminal_rewards,
    trajectories,
    whiten_tokens,
)
from paceline.types import Group


class ReinforcePp(RewardKl, RunningBaseline, Clipped):
    """`[algorithm]` with kind reinforce_pp: returns whitened over the whole rollout."""

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    """Which algorithm: `reinforce_pp` compares returns over the whole rollout."""
    baseline: Literal["none", "group", "running"] = "none"
    """What is taken off a reward first: with `group`, the mean reward of the prompt's answers in
    the same role, of which there must be at least two; with `running`, the mean of what the role
    earned before, which only matters where a policy plays several roles."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount for each token that a reward lies ahead."""

    @property
    def min_group_size(self) -> int:
        return 2 if self.baseline == "group" else 1

    def credit(self, groups: Sequence[Group], policy: str, scores: Scores | None = None) -> Credit:
        """Each trained token gets its whitened return; 0 if all returns are equal."""
        metrics = count_episodes(groups, policy)
        penalties = self.penalties(groups, policy, scores, metrics)
        paths = trajectories(groups, policy)
        rewards = [path.reward for path in paths]
        if self.baseline == "group":
            rewards = compare_groups(groups, policy, paths, rewards, centred, metrics)
        after = None
        if self.baseline == "running":
            rewards, after = self.compare_with_past(paths, rewards, scores, metrics)
        returns = [
            discounted_returns(terminal_rewards(reward, path.read(penalties)), self.gamma)
            for path, reward in zip(paths, rewards, strict=True)
        ]
        advantages = whiten_tokens(returns, metrics)
        columns = empty_columns(groups, policy)
        for path, returns_T, advantages_T in zip(paths, returns, advantages, strict=True):
            path.write(columns, advantages_T)
            metrics.mean("train/return", math.fsum(returns_T), len(returns_T))
            metrics.mean(
                "train/advantage_abs", math.fsum(map(abs, advantages_T)), len(advantages_T)
            )
        return Credit(columns, baselines=after, metrics=metrics)

    def loss(self, inputs: LossInputs) -> LossOutput:
        ratio_N = bounded_ratio(log_ratio(inputs.logprobs_N, inputs.old_logprobs_N))
        surrogate_N, means = self.surrogate(ratio_N, inputs.advantages_N)
        return policy_gradient_loss(self, inputs, surrogate_N, means)
