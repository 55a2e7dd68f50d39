"""Ragged rollouts for tests, and a stand-in for a trainer that sums losses over micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from paceline.algorithms.base import Algorithm, LossInputs, Objective
from paceline.data.packing import assign_credit, make_batches, read_scores
from paceline.observe.metrics import Metrics
from paceline.types import Episode, Group, Prompt, Row, Sample, Status


def make_sample(
    reward: float | None = 0.0,
    mask: Sequence[bool] = (False, True, True),
    *,
    prompt_id: str = "p",
    episode: int = 0,
    status: Status = Status.COMPLETED,
    policy: str = "policy",
    role: str = "policy",
    row: int = 0,
    logprobs: Sequence[float] | None = None,
) -> Sample:
    length = len(mask)
    return Sample(
        policy=policy,
        prompt_id=prompt_id,
        episode=episode,
        tokens=list(range(1, length + 1)),
        mask=list(mask),
        logprobs=[-1.0 * m for m in mask] if logprobs is None else list(logprobs),
        versions=[0 if m else -1 for m in mask],
        status=status,
        role=role,
        row=row,
        reward=reward,
    )


def make_group(
    samples_of_episodes: Sequence[Sequence[Sample]], prompt_id: str = "p", draw: int = 0
) -> Group:
    episodes = [Episode(prompt_id, i, list(s)) for i, s in enumerate(samples_of_episodes)]
    return Group(Prompt(id=prompt_id, text="?"), episodes, draw=draw)


def group_of(rewards: Iterable[float], prompt_id: str = "p", **kwargs: Any) -> Group:
    """One episode a reward, one sample an episode."""
    return make_group(
        [[make_sample(r, prompt_id=prompt_id, episode=i, **kwargs)] for i, r in enumerate(rewards)],
        prompt_id,
    )


def random_rollout(rng: np.random.Generator, num_groups: int = 3) -> list[Group]:
    """Uneven groups with masks, truncations, zero variance, failures, and cut-up episodes."""
    groups = []
    for g in range(num_groups):
        same = rng.random() < 0.25
        episodes = []
        for e in range(int(rng.integers(1, 6))):
            reward = 0.35 if same else float(rng.normal())
            status = rng.choice(
                [Status.COMPLETED, Status.TRUNCATED, Status.FAILED], p=[0.7, 0.2, 0.1]
            )
            is_masked = status == Status.TRUNCATED and rng.random() < 0.5
            samples = []
            for r in range(int(rng.integers(1, 3))):
                mask = rng.random(int(rng.integers(2, 9))) < 0.7
                mask[0] = False
                mask &= not is_masked
                samples.append(
                    make_sample(
                        reward,
                        mask.tolist(),
                        prompt_id=f"p{g}",
                        episode=e,
                        status=Status(status),
                        row=r,
                        logprobs=np.where(mask, -rng.random(mask.size) * 3, 0.0).tolist(),
                    )
                )
            episodes.append(samples)
        groups.append(make_group(episodes, f"p{g}", draw=g))
    return groups


BASELINES = {"policy": (0.25, 40)}
"""What the role earned before, for algorithms with a running baseline."""
NUM_TOP = 3
"""Tokens of a teacher at each position."""


@dataclass
class Scored:
    """A row with what the models of the moment say of it. Float64 leaves, as long as the row."""

    row: Row
    logprobs_T: torch.Tensor
    entropy_T: torch.Tensor
    values_T: torch.Tensor
    top_logprobs_TK: torch.Tensor

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        return {
            "logprobs": self.logprobs_T,
            "entropy": self.entropy_T,
            "values": self.values_T,
            "top_logprobs": self.top_logprobs_TK,
        }


@dataclass
class Update:
    loss: float = 0.0
    gradients: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """Leaf -> one array for each row."""
    partial: Metrics = field(default_factory=Metrics)

    @property
    def metrics(self) -> dict[str, float]:
        return self.partial.values()

    @property
    def grads(self) -> list[np.ndarray]:
        return self.gradients["logprobs"]


def score_rollout(
    groups: list[Group], algorithm: Algorithm, seed: int, spread: float = 0.4
) -> list[Scored]:
    """Rows of one optimizer step with scores that depend on the sample alone, and their credit."""
    batch, *_ = make_batches(groups, "policy", algorithm, 1, np.float64) or [None]
    rows = [] if batch is None else batch.rows
    scored = [_score(row, seed, spread) for row in rows]
    scores = read_scores(groups, "policy", rows)
    scores.baselines = dict(BASELINES)
    credit = algorithm.credit(groups, "policy", scores)
    assign_credit(groups, "policy", rows, credit)
    return scored


def _score(row: Row, seed: int, spread: float) -> Scored:
    length = len(row.tokens_T)
    first = row.behaviour_logprobs_T[np.flatnonzero(row.mask_T)[0]]
    key = [seed, int(-first * 1e9), row.episode[1]]
    # A longer row begins with the same numbers.
    noise = spread * np.random.default_rng(key).normal(size=(length, 7 + 2 * (NUM_TOP + 1)))
    top = torch.tensor(4 * noise[:, 7:]).unflatten(1, (2, NUM_TOP + 1)).log_softmax(-1)
    row.old_logprobs_T = row.behaviour_logprobs_T + 0.1 * noise[:, 0]
    row.reference_logprobs_T = row.behaviour_logprobs_T + noise[:, 1]
    row.values_T = noise[:, 2]
    row.final_value = float(noise[0, 0])
    row.teacher_logprobs_T = row.behaviour_logprobs_T + noise[:, 3]
    row.teacher_ids_TK = np.tile(np.arange(NUM_TOP), (length, 1))
    row.teacher_top_logprobs_TK = top[:, 0, :NUM_TOP].numpy()
    return Scored(
        row,
        torch.tensor(row.old_logprobs_T + noise[:, 4], requires_grad=True),
        torch.tensor(np.abs(noise[:, 5]), requires_grad=True),
        torch.tensor(row.values_T + noise[:, 6], requires_grad=True),
        top[:, 1, :NUM_TOP].clone().requires_grad_(),
    )


def micro_batch(scored: Sequence[Scored], part: slice = slice(None)) -> LossInputs:
    """The trained tokens of the rows; `part` takes some of each row's (context parallelism)."""
    picks = [np.flatnonzero(s.row.mask_T)[part] for s in scored]
    starts = np.cumsum([0, *(len(s.row.mask_T) for s in scored)])
    places = np.concatenate([*(p + a for p, a in zip(picks, starts, strict=False)), np.zeros(0)])
    index_N = torch.from_numpy(places.astype(np.int64))

    def column(name: str, *shape: int) -> torch.Tensor:
        found = [getattr(s.row, name) for s in scored]
        return torch.from_numpy(np.concatenate([*found, np.zeros((0, *shape))]))[index_N]

    def leaf(name: str, *shape: int) -> torch.Tensor:
        found = [s.leaves[name] for s in scored]
        return torch.cat([*found, torch.zeros((0, *shape), dtype=torch.float64)])[index_N]

    return LossInputs(
        logprobs_N=leaf("logprobs"),
        old_logprobs_N=column("old_logprobs_T"),
        behaviour_logprobs_N=column("behaviour_logprobs_T"),
        advantages_N=column("advantages_T"),
        weights_N=column("weights_T"),
        rows_N=torch.tensor([i for i, p in enumerate(picks) for _ in p], dtype=torch.int64),
        num_rows=len(scored),
        reference_logprobs_N=column("reference_logprobs_T"),
        entropy_N=leaf("entropy"),
        values_N=leaf("values"),
        old_values_N=column("values_T"),
        returns_N=None if any(s.row.returns_T is None for s in scored) else column("returns_T"),
        teacher_logprobs_N=column("teacher_logprobs_T"),
        teacher_top_logprobs_NK=column("teacher_top_logprobs_TK", NUM_TOP),
        top_logprobs_NK=leaf("top_logprobs", NUM_TOP),
    )


def run_update(
    objective: Objective, scored: Sequence[Scored], micro_batches: Sequence[LossInputs]
) -> Update:
    """Sum the losses and add up the metrics of the micro-batches; gradients per row."""
    update = Update()
    for s in scored:
        for leaf in s.leaves.values():
            leaf.grad = None
    for inputs in micro_batches:
        output = objective.loss(inputs)
        if output.loss.requires_grad:
            output.loss.backward()
        update.loss += output.loss.item()
        for name, (total, weight) in output.means.items():
            update.partial.mean(name, total.item(), weight.item())
    for s in scored:
        for name, leaf in s.leaves.items():
            grad = np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy().copy()
            update.gradients.setdefault(name, []).append(grad)
    return update


def inputs_of(
    logprobs: torch.Tensor,
    *,
    old: Sequence[float] | torch.Tensor | None = None,
    advantages: Sequence[float] | torch.Tensor | None = None,
    reference: Sequence[float] | torch.Tensor | None = None,
    weights: Sequence[float] | torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
) -> LossInputs:
    """A micro-batch of one row, of the type of `logprobs`; the mean is over its tokens."""
    n = logprobs.numel()

    def column(values: Sequence[float] | torch.Tensor | None, default: float) -> torch.Tensor:
        if values is None:
            return logprobs.new_full((n,), default)
        return torch.as_tensor(values, dtype=logprobs.dtype).detach()

    old_logprobs = logprobs.detach() if old is None else column(old, 0.0)
    return LossInputs(
        logprobs_N=logprobs,
        old_logprobs_N=old_logprobs,
        behaviour_logprobs_N=old_logprobs,
        advantages_N=column(advantages, 0.0),
        weights_N=column(weights, 1 / max(n, 1)),
        rows_N=torch.zeros(n, dtype=torch.int64),
        num_rows=1,
        reference_logprobs_N=None if reference is None else column(reference, 0.0),
        entropy_N=entropy,
    )
