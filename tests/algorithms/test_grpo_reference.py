"""GRPO against a second implementation: loops over numbers, nothing shared with the package."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from batches import Scored, micro_batch, random_rollout, run_update, score_rollout

from paceline.algorithms.grpo import Grpo
from paceline.types import Group

VARIANTS = {
    "default": Grpo(),
    "dapo": Grpo(clip_high=0.28, loss_mean="token"),
    "dr_grpo": Grpo(normalize="none", loss_mean="constant", constant_tokens=7),
    "episode": Grpo(loss_mean="episode", kl_coef=0.3, kl_estimator="k2"),
    "tight": Grpo(clip_low=0.05, clip_high=0.02, dual_clip=1.1, kl_coef=0.1),
    "k1": Grpo(kl_coef=0.2, kl_estimator="k1", entropy_coef=0.03, normalize="none"),
}


@dataclass
class Expected:
    loss: float = 0.0
    grads: dict[tuple[int, int], float] = field(default_factory=dict)
    """(row, position) -> derivative of the loss with respect to the log-prob."""
    num_clipped: int = 0
    num_tokens: int = 0
    kl: float = 0.0
    ratio: float = 0.0


def rewards_of(group: Group) -> dict[int, float]:
    found = {}
    for i, episode in enumerate(group.episodes):
        if {s.status.value for s in episode.samples} <= {"completed", "truncated"}:
            found[i] = episode.samples[0].reward
    return found


def expected_advantages(group: Group, normalize: str) -> dict[int, float]:
    rewards = rewards_of(group)
    if len(rewards) < 2 or len(set(rewards.values())) == 1:
        return dict.fromkeys(rewards, 0.0)
    mean = sum(rewards.values()) / len(rewards)
    if normalize == "none":
        return {i: r - mean for i, r in rewards.items()}
    variance = sum((r - mean) ** 2 for r in rewards.values()) / (len(rewards) - 1)
    return {i: (r - mean) / (variance**0.5 + 1e-6) for i, r in rewards.items()}


def trained_rows(groups: list[Group]) -> Iterator[tuple[Group, int, int, list[bool]]]:
    """(group, episode, trained tokens of the episode, mask) of every row, in order."""
    for group in groups:
        for i in rewards_of(group):
            samples = group.episodes[i].samples
            total = sum(sum(s.mask) for s in samples)
            for sample in samples:
                if sum(sample.mask):
                    yield group, i, total, sample.mask


def expected_update(groups: list[Group], algorithm: Grpo, scored: list[Scored]) -> Expected:
    rows = list(trained_rows(groups))
    num_tokens = sum(sum(mask) for *_, mask in rows)
    num_episodes = len({(id(group), i) for group, i, _, _ in rows})
    expected = Expected(num_tokens=num_tokens)
    for r, (group, i, episode_tokens, mask) in enumerate(rows):
        advantage = expected_advantages(group, algorithm.normalize)[i]
        weight = {
            "token": 1 / num_tokens,
            "episode": 1 / episode_tokens / num_episodes,
            "constant": 1 / num_episodes / (algorithm.constant_tokens or 1),
        }[algorithm.loss_mean]
        for t, trained in enumerate(mask):
            if trained:
                loss, grad = expected_token(algorithm, scored[r], t, advantage, expected)
                expected.loss += weight * loss
                expected.grads[r, t] = weight * grad
    return expected


def expected_token(
    algorithm: Grpo, scored: Scored, t: int, advantage: float, expected: Expected
) -> tuple[float, float]:
    row = scored.row
    assert row.old_logprobs_T is not None
    assert row.reference_logprobs_T is not None
    logprob = scored.logprobs_T[t].item()
    ratio = math.exp(logprob - row.old_logprobs_T[t])
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    objective, slope = ratio * advantage, ratio * advantage
    if advantage > 0 and ratio > high:
        objective, slope = high * advantage, 0.0
        expected.num_clipped += 1
    if advantage < 0 and ratio < low:
        objective, slope = low * advantage, 0.0
        expected.num_clipped += 1
    if algorithm.dual_clip and advantage < 0 and ratio > algorithm.dual_clip:
        objective, slope = algorithm.dual_clip * advantage, 0.0
    expected.ratio += ratio
    loss, grad = -objective, -slope
    if algorithm.kl_coef:
        d = logprob - row.reference_logprobs_T[t]
        kl, kl_grad = {
            "k1": (d, d),
            "k2": (d * d / 2, d),
            "k3": (math.exp(-d) - 1 + d, 1 - math.exp(-d)),
        }[algorithm.kl_estimator]
        expected.kl += kl
        loss += algorithm.kl_coef * kl
        grad += algorithm.kl_coef * kl_grad
    return loss - algorithm.entropy_coef * scored.entropy_T[t].item(), grad


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", range(12))
def test_loss_gradient_and_metrics_match_the_loops(variant: str, seed: int) -> None:
    algorithm = VARIANTS[variant]
    groups = random_rollout(np.random.default_rng(seed), num_groups=4)
    scored = score_rollout(groups, algorithm, seed)
    expected = expected_update(groups, algorithm, scored)
    update = run_update(algorithm, scored, [micro_batch(scored)])
    assert update.loss == pytest.approx(expected.loss, rel=1e-10, abs=1e-12)
    for r, grad_T in enumerate(update.grads):
        found = [expected.grads.get((r, t), 0.0) for t in range(len(grad_T))]
        assert grad_T == pytest.approx(found, rel=1e-9, abs=1e-12)
    n = expected.num_tokens
    assert update.metrics["clip_fraction"] == pytest.approx(expected.num_clipped / n)
    assert update.metrics["ratio"] == pytest.approx(expected.ratio / n)
    if algorithm.kl_coef:
        assert update.metrics["kl_reference"] == pytest.approx(expected.kl / n)


def test_the_random_rollouts_hold_what_they_are_meant_to_hold() -> None:
    groups = [g for seed in range(12) for g in random_rollout(np.random.default_rng(seed), 4)]
    samples = [s for g in groups for s in g.samples()]
    assert {s.status.value for s in samples} == {"completed", "truncated", "failed"}
    assert any(not any(s.mask) for s in samples)
    assert any(s.row == 1 for s in samples)
    assert any(len(set(rewards_of(g).values())) == 1 < len(rewards_of(g)) for g in groups)
    assert any(len(rewards_of(g)) == 1 for g in groups)
