"""Episodes as sequences of trained tokens: for algorithms that credit single tokens.

A trajectory holds what one role of a policy did in one episode, over all samples that the episode
was cut into, in their order. Tokens that are not trained (prompts, observations, padding) are left
out, so the token after a tool's answer follows the one before it.

    terminal reward      r_T = reward, r_t = 0 before             T: last trained token
    discounted returns   G_t = r_t + gamma G_{t+1}
    GAE                  delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lambda A_{t+1}
                         arXiv 1506.02438, equation 16; V_{T+1}: `final_value`

Pure functions over lists; sums run from the last token, so padding changes nothing.
Legend: T trained tokens of a trajectory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.algorithms.advantages import episode_reward, has_zero_variance, whitened
from paceline.observe.metrics import Metrics
from paceline.types import Group, Sample, Status

Columns = Sequence[Sequence[float]]
"""Per sample of the policy, in group order, one number per token."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The trained tokens of one role in one trainable episode."""

    group: int
    """Index of the group."""
    role: str
    reward: float
    parts: list[tuple[int, Sample]]
    """Samples with a trained token, each with its index among the samples of the policy."""

    @property
    def is_truncated(self) -> bool:
        """True if it ended at a limit."""
        return bool(self.parts) and self.parts[-1][1].status == Status.TRUNCATED

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_trained_tokens for _, sample in self.parts)

    def read(self, columns: Columns) -> list[float]:
        """The entries of its tokens, shape [T]."""
        return [
            number
            for index, sample in self.parts
            for number, trained in zip(columns[index], sample.mask, strict=True)
            if trained
        ]

    def write(self, columns: list[list[float]], values_T: Iterable[float]) -> None:
        """Put a number at each of its tokens."""
        values = iter(values_T)
        for index, sample in self.parts:
            columns[index] = [next(values) if trained else 0.0 for trained in sample.mask]


def trajectories(groups: Sequence[Group], policy: str) -> list[Trajectory]:
    """Those of all trainable episodes, in order; one without trained tokens has no parts.

    Raises RewardError as `episode_reward` does.
    """
    found: list[Trajectory] = []
    start = 0
    for number, group in enumerate(groups):
        for episode in group.episodes:
            own = [sample for sample in episode.samples if sample.policy == policy]
            if episode.is_trainable:
                for role in dict.fromkeys(sample.role for sample in own):
                    reward = episode_reward(episode, policy, role)
                    parts = [
                        (index, sample)
                        for index, sample in enumerate(own, start)
                        if sample.role == role and any(sample.mask)
                    ]
                    if reward is not None:
                        found.append(Trajectory(number, role, reward, parts))
            start += len(own)
    return found


def empty_columns(groups: Sequence[Group], policy: str) -> list[list[float]]:
    """0.0 for every token of every sample of the policy."""
    return [[0.0] * len(sample.tokens) for group in groups for sample in group.samples(policy)]


def whiten_tokens(values: Sequence[Sequence[float]], metrics: Metrics) -> list[list[float]]:
    """`whitened` over the tokens of all trajectories together."""
    flat = [value for values_T in values for value in values_T]
    metrics.sum("train/zero_variance_rollouts", bool(flat) and has_zero_variance(flat))
    found = iter(whitened(flat))
    return [[next(found) for _ in values_T] for values_T in values]


def terminal_rewards(reward: float, penalties_T: Sequence[float]) -> list[float]:
    """-penalty at each token, and the reward on top at the last one."""
    rewards_T = [-penalty for penalty in penalties_T]
    if rewards_T:
        rewards_T[-1] += reward
    return rewards_T


def discounted_returns(rewards_T: Sequence[float], gamma: float) -> list[float]:
    """G_t = r_t + gamma G_{t+1}. Example: [0, 0, 1] with gamma 0.5 -> [0.25, 0.5, 1]."""
    returns_T: list[float] = []
    ahead = 0.0
    for reward in reversed(rewards_T):
        ahead = reward + gamma * ahead
        returns_T.append(ahead)
    return returns_T[::-1]


def gae(
    rewards_T: Sequence[float],
    values_T: Sequence[float],
    *,
    gamma: float,
    gae_lambda: float,
    final_value: float = 0.0,
) -> list[float]:
    """Advantages by generalised advantage estimation.

    final_value: what the critic sees after the last token: 0 if the episode ended there.
    """
    advantages_T: list[float] = []
    ahead, next_value = 0.0, final_value
    for reward, value in zip(reversed(rewards_T), reversed(values_T), strict=True):
        delta = reward + gamma * next_value - value
        ahead = delta + gamma * gae_lambda * ahead
        next_value = value
        advantages_T.append(ahead)
    return advantages_T[::-1]
