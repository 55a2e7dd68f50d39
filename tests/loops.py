"""Every algorithm a second time, in loops over plain numbers. Nothing is shared with the package.

Read are the groups, the settings of an algorithm, and what the tests' models said of each token.
Losses and their derivatives are written down by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from batches import BASELINES, Scored

from paceline.types import Group

Key = tuple[int, int]
"""(row, position)"""


@dataclass
class Token:
    key: Key
    logprob: float
    old: float
    behaviour: float
    reference: float
    teacher: float
    entropy: float
    value: float
    """Before the first update."""
    value_now: float
    top: list[tuple[float, float]]
    """(student, teacher) log-prob of each of the teacher's tokens."""


@dataclass
class Path:
    """An episode that can be trained on: its rows one after the other."""

    group: int
    reward: float
    is_truncated: bool
    rows: list[list[Token]]
    final_value: float

    @property
    def tokens(self) -> list[Token]:
        return [token for row in self.rows for token in row]


@dataclass
class Expected:
    loss: float = 0.0
    logprobs: dict[Key, float] = field(default_factory=dict)
    """Derivative of the loss with respect to each log-prob, and so on."""
    entropy: dict[Key, float] = field(default_factory=dict)
    top_logprobs: dict[Key, list[float]] = field(default_factory=dict)
    critic_loss: float = 0.0
    values: dict[Key, float] = field(default_factory=dict)
    advantages: dict[Key, float] = field(default_factory=dict)
    returns: dict[Key, float] = field(default_factory=dict)
    corrections: dict[Key, float] = field(default_factory=dict)
    num_tokens: int = 0
    num_clipped: int = 0


def read_paths(groups: list[Group], scored: list[Scored]) -> list[Path]:
    paths = []
    number = 0
    for g, group in enumerate(groups):
        for episode in group.episodes:
            if not {s.status.value for s in episode.samples} <= {"completed", "truncated"}:
                continue
            path = Path(g, episode.samples[0].reward, False, [], 0.0)
            for sample in episode.samples:
                if sum(sample.mask):
                    path.rows.append(_tokens(number, scored[number], sample.mask))
                    path.is_truncated = sample.status.value == "truncated"
                    path.final_value = scored[number].row.final_value
                    number += 1
            paths.append(path)
    assert number == len(scored)
    return paths


def _tokens(number: int, scored: Scored, mask: list[bool]) -> list[Token]:
    row = scored.row
    return [
        Token(
            (number, t),
            scored.logprobs_T[t].item(),
            float(row.old_logprobs_T[t]),
            float(row.behaviour_logprobs_T[t]),
            float(row.reference_logprobs_T[t]),
            float(row.teacher_logprobs_T[t]),
            scored.entropy_T[t].item(),
            float(row.values_T[t]),
            scored.values_T[t].item(),
            list(
                zip(
                    scored.top_logprobs_TK[t].tolist(),
                    row.teacher_top_logprobs_TK[t].tolist(),
                    strict=True,
                )
            ),
        )
        for t, trained in enumerate(mask)
        if trained
    ]


def expected_update(algorithm: Any, groups: list[Group], scored: list[Scored]) -> Expected:
    """One optimizer step: loss, derivatives, advantages."""
    paths = read_paths(groups, scored)
    found = Expected(num_tokens=sum(len(path.tokens) for path in paths))
    found.advantages, found.returns = advantages_of(algorithm, paths)
    weights = weights_of(algorithm, paths)
    for path in paths:
        for row in path.rows:
            found.corrections |= corrections_of(algorithm, row)
            for token, loss, slopes in policy_terms(algorithm, row, weights, found):
                found.loss += loss
                for key, slope in slopes.items():
                    found.logprobs[key] = found.logprobs.get(key, 0.0) + slope
                _other_terms(algorithm, token, weights[token.key], found)
            for token in row:
                if found.returns:
                    _critic_term(algorithm, token, weights[token.key], found)
    return found


def weights_of(algorithm: Any, paths: list[Path]) -> dict[Key, float]:
    num_tokens = sum(len(path.tokens) for path in paths)
    num_episodes = sum(1 for path in paths if path.tokens)
    weights = {}
    for path in paths:
        for token in path.tokens:
            if algorithm.loss_mean == "token":
                weights[token.key] = 1 / num_tokens
            elif algorithm.loss_mean == "episode":
                weights[token.key] = 1 / len(path.tokens) / num_episodes
            else:
                weights[token.key] = 1 / num_episodes / algorithm.constant_tokens
    return weights


def kl_value(estimator: str, d: float) -> float:
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d**2 / 2
    return math.exp(-d) - 1 + d


# Advantages


def advantages_of(algorithm: Any, paths: list[Path]) -> tuple[dict[Key, float], dict[Key, float]]:
    kind = algorithm.kind
    penalty = {}
    for path in paths:
        for token in path.tokens:
            in_reward = getattr(algorithm, "kl_in", "loss") == "reward"
            kl = kl_value(algorithm.kl_estimator, token.old - token.reference)
            penalty[token.key] = algorithm.kl_coef * kl if in_reward else 0.0
    if kind in ("reinforce_pp", "ppo"):
        return token_advantages(algorithm, paths, penalty)
    found = {}
    for path in paths:
        totals = [
            other.reward - sum(penalty[t.key] for t in other.tokens)
            for other in paths
            if other.group == path.group
        ]
        own = path.reward - sum(penalty[t.key] for t in path.tokens)
        advantage = compared(algorithm, own, totals)
        found |= {token.key: advantage for token in path.tokens}
    return found, {}


def compared(algorithm: Any, own: float, rewards: list[float]) -> float:
    """Advantage of one episode among all of its group, itself included."""
    size = len(rewards)
    if getattr(algorithm, "baseline", "none") == "running":
        return own - BASELINES["policy"][0]
    if size < 2 or max(rewards) == min(rewards):
        return 0.0
    if algorithm.kind == "rloo":
        return own - (sum(rewards) - own) / (size - 1)
    mean = sum(rewards) / size
    if algorithm.normalize == "none":
        advantage = own - mean
    else:
        variance = sum((r - mean) ** 2 for r in rewards) / (size - 1)
        advantage = (own - mean) / (variance**0.5 + 1e-6)
    if algorithm.kind == "distill":
        return algorithm.reward_coef * advantage
    return advantage


def token_advantages(
    algorithm: Any, paths: list[Path], penalty: dict[Key, float]
) -> tuple[dict[Key, float], dict[Key, float]]:
    found: dict[Key, float] = {}
    returns: dict[Key, float] = {}
    for path in paths:
        reward = path.reward
        if getattr(algorithm, "baseline", "none") == "group":
            rewards = [other.reward for other in paths if other.group == path.group]
            reward = reward - sum(rewards) / len(rewards)
            if max(rewards) == min(rewards):
                reward = 0.0
        if getattr(algorithm, "baseline", "none") == "running":
            reward = reward - BASELINES["policy"][0]
        tokens = path.tokens
        for start, token in enumerate(tokens):
            rewards_from = [-penalty[t.key] for t in tokens[start:]]
            rewards_from[-1] += reward
            if algorithm.kind == "reinforce_pp":
                found[token.key] = sum(algorithm.gamma**n * r for n, r in enumerate(rewards_from))
                continue
            # GAE as its definition has it: a sum over all steps ahead.
            values = [t.value for t in tokens[start:]]
            is_open = algorithm.bootstrap_truncated and path.is_truncated
            values.append(path.final_value if is_open else 0.0)
            found[token.key] = sum(
                (algorithm.gamma * algorithm.gae_lambda) ** n
                * (r + algorithm.gamma * values[n + 1] - values[n])
                for n, r in enumerate(rewards_from)
            )
            returns[token.key] = found[token.key] + token.value
    if algorithm.kind == "reinforce_pp" or algorithm.whiten_advantages:
        mean = sum(found.values()) / max(len(found), 1)
        squares = sum((a - mean) ** 2 for a in found.values())
        std = (squares / max(len(found) - 1, 1)) ** 0.5
        is_flat = std < 1e-12
        found = {k: 0.0 if is_flat else (a - mean) / (std + 1e-6) for k, a in found.items()}
    return found, returns


# Importance correction


def corrections_of(algorithm: Any, row: list[Token]) -> dict[Key, float]:
    settings = algorithm.correction
    if settings is None:
        return {token.key: 1.0 for token in row}
    gaps = [token.old - token.behaviour for token in row]
    found = {}
    for token, gap in zip(row, gaps, strict=True):
        joined = {"token": gap, "sequence": sum(gaps), "geometric": sum(gaps) / len(gaps)}
        weight = math.exp(joined[settings.level])
        if settings.mode == "mask":
            weight = weight if settings.low <= weight <= settings.high else 0.0
        else:
            weight = min(weight, settings.high)
            weight = max(weight, settings.low or 0.0)
        if settings.veto is not None and min(gaps) < math.log(settings.veto):
            weight = 0.0
        found[token.key] = weight
    return found


# Losses


def policy_terms(
    algorithm: Any, row: list[Token], weights: dict[Key, float], found: Expected
) -> Iterator[tuple[Token, float, dict[Key, float]]]:
    """(token, its share of the loss, derivative with respect to each log-prob of its row)."""
    mean_gap = sum(token.logprob - token.old for token in row) / len(row)
    for token in row:
        advantage = found.advantages[token.key]
        factor = weights[token.key] * found.corrections[token.key]
        ratio = math.exp(token.logprob - token.old)
        if algorithm.kind == "cispo":
            low = 0.0 if algorithm.clip_low is None else 1 - algorithm.clip_low
            held = min(max(ratio, low), 1 + algorithm.clip_high)
            found.num_clipped += held != ratio
            loss, slope = -held * advantage * token.logprob, -held * advantage
            yield token, factor * loss, {token.key: factor * slope}
            continue
        if algorithm.kind == "gspo":
            ratio = math.exp(mean_gap)
            loss, slope = clipped(algorithm, ratio, advantage, found)
            yield (
                token,
                factor * loss,
                {other.key: factor * slope / len(row) for other in row},
            )
            continue
        if algorithm.kind == "distill" and not algorithm.top_k:
            advantage -= token.logprob - token.teacher
        loss, slope = clipped(algorithm, ratio, advantage, found)
        yield token, factor * loss, {token.key: factor * slope}


def clipped(algorithm: Any, ratio: float, advantage: float, found: Expected) -> tuple[float, float]:
    """Loss and its derivative with respect to the logarithm of the ratio."""
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    objective, slope = ratio * advantage, ratio * advantage
    if advantage > 0 and ratio > high:
        objective, slope = high * advantage, 0.0
        found.num_clipped += 1
    if advantage < 0 and ratio < low:
        objective, slope = low * advantage, 0.0
        found.num_clipped += 1
    if algorithm.dual_clip and advantage < 0 and ratio > algorithm.dual_clip:
        objective, slope = algorithm.dual_clip * advantage, 0.0
    return -objective, -slope


def _other_terms(algorithm: Any, token: Token, weight: float, found: Expected) -> None:
    """KL to the reference, entropy, and a teacher's most likely tokens."""
    if algorithm.kl_coef and getattr(algorithm, "kl_in", "loss") == "loss":
        d = token.logprob - token.reference
        slope = 1 - math.exp(-d) if algorithm.kl_estimator == "k3" else d
        found.loss += weight * algorithm.kl_coef * kl_value(algorithm.kl_estimator, d)
        found.logprobs[token.key] += weight * algorithm.kl_coef * slope
    found.loss -= weight * algorithm.entropy_coef * token.entropy
    found.entropy[token.key] = -weight * algorithm.entropy_coef
    if algorithm.kind == "distill" and algorithm.top_k:
        kl, slopes = joined_kl(token.top, algorithm.top_k_weights)
        found.loss += weight * kl
        found.top_logprobs[token.key] = [weight * slope for slope in slopes]


def joined_kl(top: list[tuple[float, float]], weights: str) -> tuple[float, list[float]]:
    """KL over the teacher's tokens and the rest, and its derivatives by the student's log-probs."""
    p, q = [math.exp(s) for s, _ in top], [math.exp(t) for _, t in top]
    p_rest, q_rest = 1 - sum(p), 1 - sum(q)
    if weights == "student":
        kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        kl += p_rest * math.log(p_rest / q_rest)
        slopes = [
            a * (math.log(a / b) - math.log(p_rest / q_rest)) for a, b in zip(p, q, strict=True)
        ]
        return kl, slopes
    kl = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    kl += q_rest * math.log(q_rest / p_rest)
    return kl, [-b + q_rest * a / p_rest for a, b in zip(p, q, strict=True)]


def _critic_term(algorithm: Any, token: Token, weight: float, found: Expected) -> None:
    target = found.returns[token.key]
    error = token.value_now - target
    loss, slope = error**2 / 2, error
    limit = algorithm.value_clip
    if limit is not None:
        move = min(max(token.value_now - token.value, -limit), limit)
        held = token.value + move - target
        if held**2 > error**2:
            loss, slope = held**2 / 2, 0.0
    found.critic_loss += weight * loss
    found.values[token.key] = weight * slope
