"""What happens to groups between sampling and credit, in this order:

settle_failures    failed and unscored episodes, by `reward.on_failure`
shape_overlong     the overlong penalty (DAPO, arXiv 2503.14476)
drop_reason        groups that nothing can be learned from
mask_truncated     truncated answers keep their reward and lose their gradient
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from paceline.algorithms.advantages import episode_reward, has_zero_variance
from paceline.errors import RewardError, RolloutError
from paceline.rollout.settings import OnFailure, RolloutConfig
from paceline.types import NO_VERSION, Episode, Group, Sample, Status

OVERLONG = "overlong"
"""Name of the reward part."""


def settle_failures(group: Group, on_failure: OnFailure) -> str | None:
    """Apply the failure policy to a group, in place; the reason to drop it as a whole, if any.

    Samples that the engine could not serve are never trained on, whatever the policy. Raises
    RewardError or RolloutError under `fail`.
    """
    failed = [sample for sample in group.samples() if _has_failed(sample)]
    if failed and on_failure == "fail":
        raise _failure(failed[0])
    if on_failure == "zero":
        for episode in group.episodes:
            _zero(episode)
    if failed and on_failure == "drop_group":
        return "failed"
    return None if any(episode.is_trainable for episode in group.episodes) else "failed"


def shape_overlong(group: Group, config: RolloutConfig) -> None:
    """Subtract the overlong penalty from the reward of each long answer, in place.

    With L = max_tokens, W = overlong_window, n = tokens of the longest answer of a role in an
    episode: penalty * clamp((n - (L - W)) / W, 0, 1).
    """
    if not config.overlong_penalty:
        return
    free = config.sampling.max_tokens - config.overlong_window
    for episode in group.episodes:
        for sample in episode.samples:
            excess = (longest_answer(episode, sample.role) - free) / config.overlong_window
            penalty = -config.overlong_penalty * min(max(excess, 0.0), 1.0) + 0.0
            if sample.reward is not None:
                sample.reward += penalty
                sample.reward_parts[OVERLONG] = penalty


def drop_reason(group: Group, policy: str, config: RolloutConfig) -> str | None:
    """`zero_variance` if dynamic sampling drops the group."""
    if config.dynamic_sampling and is_zero_variance(group, policy):
        return "zero_variance"
    return None


def is_zero_variance(group: Group, policy: str) -> bool:
    """True if in every role of the policy all rewards are equal, or there is only one."""
    return are_equal(rewards_by_role(group, policy))


def are_equal(rewards: Sequence[tuple[str, float]]) -> bool:
    """True if in every role all rewards are equal. rewards: (role, reward)."""
    roles = {role for role, _ in rewards}
    return all(has_zero_variance([r for name, r in rewards if name == role]) for role in roles)


def rewards_of(group: Group, policy: str, role: str | None = None) -> list[float]:
    """Rewards of the trainable episodes, each once; of all roles of the policy or the one named.

    An episode in which nothing was to be scored has none.
    """
    return [r for name, r in rewards_by_role(group, policy) if role in (None, name)]


def rewards_by_role(group: Group, policy: str) -> list[tuple[str, float]]:
    """(role, reward) of the policy's roles in each trainable episode, in order."""
    found = []
    for episode in group.episodes:
        if not episode.is_trainable:
            continue
        own = (s for s in episode.samples if s.policy == policy)
        for role in sorted({s.role for s in own if s.reward is not None}):
            reward = episode_reward(episode, policy, role)
            if reward is not None:
                found.append((role, reward))
    return found


def mask_truncated(group: Group) -> None:
    """Take truncated samples out of the loss, in place."""
    for sample in group.samples():
        if sample.status is Status.TRUNCATED:
            length = len(sample.tokens)
            sample.mask = [False] * length
            sample.logprobs = [0.0] * length
            sample.versions = [NO_VERSION] * length


def longest_answer(episode: Episode, role: str) -> int:
    """Tokens of the longest single answer of a role in an episode."""
    return max(answer_lengths([s for s in episode.samples if s.role == role]), default=0)


def answer_lengths(samples: Sequence[Sample]) -> Iterator[int]:
    """Tokens of every answer: runs of the mask."""
    for sample in samples:
        for is_answer, run in groupby(sample.mask):
            if is_answer:
                yield len(list(run))


def _has_failed(sample: Sample) -> bool:
    """True if reward or environment failed; False for what the engine did not serve."""
    is_infrastructure = (sample.cause or "").startswith("engine/")
    return not sample.status.is_trainable and not is_infrastructure


def _zero(episode: Episode) -> None:
    """Reward 0 for an episode that failed after the policy had answered."""
    if episode.is_trainable or not all(
        sample.status.is_trainable or _has_failed(sample) for sample in episode.samples
    ):
        return
    if not any(sample.num_trained_tokens for sample in episode.samples):
        return
    for sample in episode.samples:
        sample.reward = 0.0
        sample.status = Status.TRUNCATED if sample.finish == "length" else Status.COMPLETED


def all_failed(groups: Sequence[Group], step: int) -> RewardError | RolloutError:
    """The error for groups of which no sample can be trained on."""
    samples = [sample for group in groups for sample in group.samples()]
    if not samples:
        return RolloutError(
            f"step {step}: no role that learns was asked anything in any of "
            f"{sum(len(group.episodes) for group in groups)} episodes: let the environment await "
            "an answer of its actors"
        )
    causes = Counter(sample.cause or sample.status.value for sample in samples)
    counts = ", ".join(f"{count} {cause}" for cause, count in causes.most_common())
    first = next((sample for sample in samples if sample.cause), None)
    detail = f"\nThe first one: {_describe(first)}" if first is not None else ""
    return _error_of(first)(f"step {step}: all {len(samples)} samples failed: {counts}{detail}")


def _failure(sample: Sample) -> RewardError | RolloutError:
    return _error_of(sample)(
        f"{_describe(sample)}\n"
        "The run ends since reward.on_failure is 'fail'; drop_sample, drop_group and zero go on"
    )


def _describe(sample: Sample) -> str:
    return f"prompt {sample.prompt_id!r}, episode {sample.episode}: {sample.cause}: {sample.detail}"


def _error_of(sample: Sample | None) -> type[RewardError] | type[RolloutError]:
    is_reward = sample is not None and (sample.cause or "").startswith("reward/")
    return RewardError if is_reward else RolloutError
