"""PPO with a critic. arXiv 1707.06347; advantages by GAE, arXiv 1506.02438.

A critic predicts from each prefix what the answer will still earn; a token is good if things went
better than that. Only trained tokens count as steps:

    r_t     = -kl_coef KL_t + [t is the last trained token] reward          kl_in = "reward"
    delta_t = r_t + gamma V_{t+1} - V_t
    A_t     = delta_t + gamma gae_lambda A_{t+1}
    R_t     = A_t + V_t                                                     the critic's target
    A_t     = (A_t - mean(A)) / (std(A) + 1e-6)   over all trained tokens, if whiten_advantages

After the last token V is 0: the episode ended there. An answer that was cut off at a limit did not
end; with bootstrap_truncated the critic's value after its last token takes the place of that 0.

The policy's loss is the clipped surrogate of `paceline.algorithms.clipping`; the critic's is in
`paceline.algorithms.critic`. Rows of one episode are one trajectory, in their order.

Legend: T trained tokens of an episode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from paceline.algorithms.base import Credit, LossInputs, LossOutput, Objective, Scores
from paceline.algorithms.clipping import Clipped
from paceline.algorithms.critic import ValueObjective
from paceline.algorithms.group_credit import count_episodes
from paceline.algorithms.kl import bounded_ratio, log_ratio
from paceline.algorithms.policy_gradient import given, policy_gradient_loss
from paceline.algorithms.reward_kl import RewardKl
from paceline.algorithms.trajectories import (
    Trajectory,
    empty_columns,
    gae,
    terminal_rewards,
    trajectories,
    whiten_tokens,
)
from paceline.observe.metrics import Metrics
from paceline.types import Group


class Ppo(RewardKl, Clipped):
    """`[algorithm]` with kind ppo: a critic says what each token is worth."""

    kind: Literal["ppo"] = "ppo"
    """Which algorithm: `ppo` learns a critic, which tells good tokens of an answer from bad."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount for each token that a reward lies ahead."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """1 trusts rewards alone: no bias, more variance. Below 1 the critic's own predictions take
    part, with the weight of what lies n tokens ahead falling as `gae_lambda` to the n."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """How far the critic's prediction of a token may move in the updates of one rollout before it
    stops learning; absent: any distance. In units of the reward."""
    bootstrap_truncated: bool = False
    """What follows an answer that was cut off at a limit: false, nothing; true, what the critic
    expects. True keeps the critic from learning that length itself ends rewards."""
    whiten_advantages: bool = True
    """Shift and scale the advantages of a rollout to mean 0 and standard deviation 1."""

    @property
    def critic(self) -> Objective | None:
        return ValueObjective(self.value_clip)

    @property
    def needs_final_values(self) -> bool:
        return self.bootstrap_truncated

    def credit(self, groups: Sequence[Group], policy: str, scores: Scores | None = None) -> Credit:
        """Advantages for the policy and returns for its critic."""
        scores = scores or Scores()
        metrics = count_episodes(groups, policy)
        penalties = self.penalties(groups, policy, scores, metrics)
        values = given(scores.values, "values", "credit of ppo")
        paths = trajectories(groups, policy)
        advantages, returns = [], []
        for path in paths:
            values_T = path.read(values)
            advantages_T = gae(
                terminal_rewards(path.reward, path.read(penalties)),
                values_T,
                gamma=self.gamma,
                gae_lambda=self.gae_lambda,
                final_value=self._final_value(path, scores),
            )
            advantages.append(advantages_T)
            returns.append([a + v for a, v in zip(advantages_T, values_T, strict=True)])
        _count_returns(returns, advantages, metrics)
        if self.whiten_advantages:
            advantages = whiten_tokens(advantages, metrics)
        columns = empty_columns(groups, policy), empty_columns(groups, policy)
        for path, advantages_T, returns_T in zip(paths, advantages, returns, strict=True):
            path.write(columns[0], advantages_T)
            path.write(columns[1], returns_T)
            metrics.mean(
                "train/advantage_abs", math.fsum(map(abs, advantages_T)), len(advantages_T)
            )
        return Credit(columns[0], returns=columns[1], metrics=metrics)

    def loss(self, inputs: LossInputs) -> LossOutput:
        ratio_N = bounded_ratio(log_ratio(inputs.logprobs_N, inputs.old_logprobs_N))
        surrogate_N, means = self.surrogate(ratio_N, inputs.advantages_N)
        return policy_gradient_loss(self, inputs, surrogate_N, means)

    def _final_value(self, path: Trajectory, scores: Scores) -> float:
        if not (self.bootstrap_truncated and path.is_truncated):
            return 0.0
        final_values = given(scores.final_values, "final_values", "credit of ppo")
        return final_values[path.parts[-1][0]]


def _count_returns(
    returns: Sequence[Sequence[float]], errors: Sequence[Sequence[float]], metrics: Metrics
) -> None:
    """Mean return, and the share of its variance that the critic explains: 1 - Var(R - V) / Var(R).

    errors: R - V of each token, which is its advantage before whitening.
    """
    flat = [number for returns_T in returns for number in returns_T]
    if not flat:
        return
    metrics.mean("train/return", math.fsum(flat), len(flat))
    variance = _variance(flat)
    if variance > 0:
        unexplained = _variance([number for errors_T in errors for number in errors_T])
        metrics.mean("critic/explained_variance", 1 - unexplained / variance)


def _variance(numbers: Sequence[float]) -> float:
    mean = math.fsum(numbers) / len(numbers)
    return math.fsum((number - mean) ** 2 for number in numbers) / len(numbers)
