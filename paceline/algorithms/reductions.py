"""The mean of a loss over tokens of uneven rows, as one weight per token.

    token       sum over all trained tokens / number of trained tokens
    episode     mean over episodes of (mean over the trained tokens of the episode)
    constant    sum over all trained tokens / (number of episodes * constant_tokens)

`token` gives each token, `episode` each episode the same say; `constant` does not divide by
lengths that the policy itself chose (Dr. GRPO, arXiv 2503.20783, section 3.1).

Each denominator is counted over the whole optimizer step, so that no split of its rows can change
the loss. Only tokens that are trained count, and only episodes that have one: rows with an empty
mask, and episodes that are not trainable, change nothing. Rows of one episode share its say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from paceline.errors import ConfigError
from paceline.types import Episode, Group

LossMean = Literal["token", "episode", "constant"]


def token_share(
    mode: LossMean,
    *,
    num_tokens: int | None = None,
    episode_tokens: int | None = None,
    num_episodes: int | None = None,
    constant_tokens: int | None = None,
) -> float:
    """Weight of one trained token.

    num_tokens: trained tokens of the optimizer step. episode_tokens: those of the token's
    episode. num_episodes: episodes of the optimizer step with a trained token.
    Raises ConfigError, a ValueError, that names the mode if a denominator of it is absent.
    """
    match mode:
        case "token":
            return 1 / _needed(mode, "num_tokens", num_tokens)
        case "episode":
            episodes = _needed(mode, "num_episodes", num_episodes)
            return 1 / (episodes * _needed(mode, "episode_tokens", episode_tokens))
        case "constant":
            episodes = _needed(mode, "num_episodes", num_episodes)
            return 1 / (episodes * _needed(mode, "constant_tokens", constant_tokens))


def token_weights(
    groups: Sequence[Group], policy: str, mode: LossMean, constant_tokens: int | None = None
) -> list[list[float]]:
    """Per sample of the policy, in group order, the weight of each token; 0.0 if not trained."""
    episodes = [episode for group in groups for episode in group.episodes]
    counts = [num_trained_tokens(episode, policy) for episode in episodes]
    num_tokens = sum(counts)
    num_episodes = sum(count > 0 for count in counts)
    weights = []
    for episode, count in zip(episodes, counts, strict=True):
        share = 0.0
        if count:
            share = token_share(
                mode,
                num_tokens=num_tokens,
                episode_tokens=count,
                num_episodes=num_episodes,
                constant_tokens=constant_tokens,
            )
        weights += [
            [share if trained else 0.0 for trained in sample.mask]
            for sample in episode.samples
            if sample.policy == policy
        ]
    return weights


def num_trained_tokens(episode: Episode, policy: str) -> int:
    """Tokens of the episode that the policy is trained on; 0 if the episode is not trainable."""
    if not episode.is_trainable:
        return 0
    return sum(s.num_trained_tokens for s in episode.samples if s.policy == policy)


def _needed(mode: LossMean, name: str, value: int | None) -> int:
    if value is None or value < 1:
        raise ConfigError(
            f"loss_mean = {mode!r} needs {name} of at least 1 as its denominator, found {value}"
        )
    return value
