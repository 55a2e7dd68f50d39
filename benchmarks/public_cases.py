"""Random ragged batches, padded for other systems and as groups for the package; and what it makes
of them.

Legend: B rows, T positions, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.algorithms.base import Algorithm, LossInputs, Objective, Scores
from paceline.types import Episode, Group, Prompt, Sample, Status

Tensor = torch.Tensor
NUM_ROWS, NUM_GROUPS, LONGEST = 16, 4, 9


@dataclass
class Case:
    """One batch, padded [B, T]; `groups` hold the same samples for the package."""

    groups: list[Group]
    index_B: np.ndarray
    mask_BT: Tensor
    rewards_B: Tensor
    columns: dict[str, Tensor]

    def __getattr__(self, name: str) -> Tensor:
        return self.columns[name]

    @property
    def leaf(self) -> Tensor:
        """Log-probs under the current weights, fresh for each call."""
        return self.columns["logprobs"].clone().requires_grad_()

    @property
    def terminal(self) -> Tensor:
        """The reward at the last trained token of each row."""
        rewards_BT = torch.zeros_like(self.mask_BT)
        for b, row in enumerate(self.mask_BT):
            trained = row.nonzero()
            if len(trained):
                rewards_BT[b, trained[-1]] = self.rewards_B[b]
        return rewards_BT


def make_case(
    seed: int, *, masked_row: bool = False, on_policy: bool = False, single: bool = False
) -> Case:
    """masked_row: one answer has no trained token. on_policy: no update was made yet. single: one
    answer a prompt."""
    num_groups, group_size = (NUM_ROWS, 1) if single else (NUM_GROUPS, NUM_ROWS // NUM_GROUPS)
    rng = np.random.default_rng(seed)
    size = NUM_ROWS
    mask = rng.random((size, LONGEST)) < 0.8
    lengths = rng.integers(2, LONGEST + 1, size)
    mask &= np.arange(LONGEST) < lengths[:, None]
    mask[:, 0] = True
    if masked_row:
        mask[5] = False
    rewards = rng.normal(size=size)
    rewards[:group_size] = 0.35
    noise = rng.normal(size=(8, size, LONGEST))
    behaviour = -np.abs(noise[0]) * mask
    old = behaviour + 0.2 * noise[1] * mask
    logprobs = old if on_policy else old + 0.3 * noise[2] * mask
    columns = {
        "behaviour": behaviour,
        "old": old,
        "logprobs": logprobs,
        "reference": logprobs + 0.5 * noise[3] * mask,
        "entropy": np.abs(noise[4]),
        "values": noise[5],
        "values_now": noise[5] + 0.3 * noise[6],
    }
    groups = []
    for g in range(num_groups):
        members = range(g * group_size, (g + 1) * group_size)
        episodes = [
            Episode(f"p{g}", e, [_sample(mask[b], behaviour[b], rewards[b], f"p{g}", e, rng)])
            for e, b in enumerate(members)
        ]
        groups.append(Group(Prompt(id=f"p{g}", text="?"), episodes, draw=g))
    return Case(
        groups,
        np.repeat(np.arange(num_groups), group_size),
        torch.tensor(mask, dtype=torch.float64),
        torch.tensor(rewards),
        {name: torch.tensor(column) for name, column in columns.items()},
    )


def _sample(
    mask: np.ndarray,
    behaviour: np.ndarray,
    reward: float,
    prompt_id: str,
    episode: int,
    rng: np.random.Generator,
) -> Sample:
    """The row behind a prompt of one token."""
    return Sample(
        policy="policy",
        prompt_id=prompt_id,
        episode=episode,
        tokens=[1] * (LONGEST + 1),
        mask=[False, *mask.tolist()],
        logprobs=[0.0, *behaviour.tolist()],
        versions=[-1] * (LONGEST + 1),
        status=Status.TRUNCATED if rng.random() < 0.2 else Status.COMPLETED,
        reward=float(reward),
    )


def padded(columns: list[list[float]]) -> Tensor:
    return torch.tensor([column[1:] for column in columns], dtype=torch.float64)


def scores_of(case: Case) -> Scores:
    def column(name: str) -> list[list[float]]:
        return [[0.0, *row] for row in (case.columns[name] * case.mask_BT).tolist()]

    return Scores(column("old"), column("reference"), column("values"))


def own_advantages(algorithm: Algorithm, case: Case) -> Tensor:
    return padded(algorithm.credit(case.groups, "policy", scores_of(case)).advantages)


def own_update(algorithm: Any, case: Case, objective: Objective | None = None) -> list[Tensor]:
    """[loss, gradient]"""
    credit = algorithm.credit(case.groups, "policy", scores_of(case))
    is_trained_BT = case.mask_BT.bool()
    leaf_BT = case.leaf if objective is None else case.values_now.clone().requires_grad_()

    def pick(values_BT: Tensor) -> Tensor:
        return values_BT[is_trained_BT]

    values_N = None if objective is None else pick(leaf_BT)
    inputs = LossInputs(
        logprobs_N=pick(leaf_BT),
        old_logprobs_N=pick(case.old),
        behaviour_logprobs_N=pick(case.behaviour),
        advantages_N=pick(padded(credit.advantages)),
        weights_N=pick(padded(algorithm.token_weights(case.groups, "policy"))),
        rows_N=is_trained_BT.nonzero()[:, 0],
        num_rows=len(leaf_BT),
        reference_logprobs_N=pick(case.reference),
        entropy_N=pick(case.entropy),
        values_N=values_N,
        old_values_N=pick(case.values),
        returns_N=None if credit.returns is None else pick(padded(credit.returns)),
        teacher_logprobs_N=pick(case.reference),
    )
    loss = (objective or algorithm).loss(inputs).loss
    (grad_BT,) = torch.autograd.grad(loss, leaf_BT)
    return [loss.detach(), grad_BT]


def differentiated(leaf_BT: Tensor, loss: Tensor) -> list[Tensor]:
    (grad_BT,) = torch.autograd.grad(loss, leaf_BT)
    return [loss.detach(), grad_BT]


@dataclass
class Line:
    what: str
    theirs: str
    differs: str
    """Why the two differ by design; empty: they must agree."""
    rounds: str
    """Why they agree up to 1e-5 only; empty: up to 1e-6."""
    compute: Callable[[Case], tuple[list[Tensor], list[Tensor]]]
    """(own, theirs)"""
    case: dict[str, bool]


def line(
    what: str,
    theirs: str,
    own: Callable[[Case], Any],
    other: Callable[[Case], Any],
    differs: str = "",
    rounds: str = "",
    **case: bool,
) -> Line:
    """own, other: a tensor, or [loss, gradient], of a case."""

    def both(one: Case) -> tuple[list[Tensor], list[Tensor]]:
        first, second = (
            [found] if isinstance(found, Tensor) else found for found in (own(one), other(one))
        )
        return first, second

    return Line(what, theirs, differs, rounds, both, case)
