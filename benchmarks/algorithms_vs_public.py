"""The package's losses and advantages against the public code of verl and TRL, on the same batches.

Random ragged batches in float64: masks with holes, truncated answers, a group without variance,
an answer that is masked out whole where it says so. Compared are the loss and its gradient with
respect to each log-prob (or the advantages), as the largest difference over all batches, relative
to the largest number. Where the systems differ by design the reason is shown, and the line counts
as a failure if they agree. The results are in `benchmarks/algorithms.md`.

Set up once, in a folder outside the repository (CPU only; ray is imported by verl, not started):

    python -m venv public
    public/bin/pip install . trl==1.16.0 datasets accelerate
    public/bin/pip install --no-deps verl==0.9.1
    public/bin/pip install ray omegaconf hydra-core "tensordict<=0.10.0" orjson

    PYTHONPATH=. OMP_NUM_THREADS=1 public/bin/python benchmarks/algorithms_vs_public.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import public_losses as public
import torch

from paceline.algorithms.base import Algorithm, LossInputs, Objective, Scores
from paceline.algorithms.cispo import Cispo
from paceline.algorithms.correction import Correction
from paceline.algorithms.distill import Distill, top_k_kl
from paceline.algorithms.grpo import Grpo
from paceline.algorithms.gspo import Gspo
from paceline.algorithms.ppo import Ppo
from paceline.algorithms.reinforce_pp import ReinforcePp
from paceline.algorithms.rloo import Rloo
from paceline.types import Episode, Group, Prompt, Sample, Status

Tensor = torch.Tensor
SEEDS = range(20)
NUM_GROUPS, GROUP_SIZE, LONGEST = 4, 4, 9
TOLERANCE = 1e-6


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


def make_case(seed: int, *, masked_row: bool = False, on_policy: bool = False) -> Case:
    rng = np.random.default_rng(seed)
    size = NUM_GROUPS * GROUP_SIZE
    mask = rng.random((size, LONGEST)) < 0.8
    lengths = rng.integers(2, LONGEST + 1, size)
    mask &= np.arange(LONGEST) < lengths[:, None]
    mask[:, 0] = True
    if masked_row:
        mask[5] = False
    rewards = rng.normal(size=size)
    rewards[:GROUP_SIZE] = 0.35
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
    for g in range(NUM_GROUPS):
        members = range(g * GROUP_SIZE, (g + 1) * GROUP_SIZE)
        episodes = [
            Episode(f"p{g}", e, [_sample(mask[b], behaviour[b], rewards[b], f"p{g}", e, rng)])
            for e, b in enumerate(members)
        ]
        groups.append(Group(Prompt(id=f"p{g}", text="?"), episodes, draw=g))
    return Case(
        groups,
        np.repeat(np.arange(NUM_GROUPS), GROUP_SIZE),
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


# The package on a case


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


def verl_update(
    name: str, algorithm: Any, case: Case, mean: str = "token-mean", **settings: Any
) -> list[Tensor]:
    leaf_BT = case.leaf
    advantages_BT = own_advantages(algorithm, case)
    loss = public.verl_loss(name, leaf_BT, case.old, advantages_BT, case.mask_BT, mean, **settings)
    return differentiated(leaf_BT, loss)


def trl_update(algorithm: Any, case: Case, **settings: Any) -> list[Tensor]:
    leaf_BT = case.leaf
    advantages_B = own_advantages(algorithm, case).sum(1) / case.mask_BT.sum(1).clamp(min=1)
    loss = public.trl_loss(
        leaf_BT,
        case.old,
        advantages_B,
        case.mask_BT,
        reference_BT=case.reference,
        entropy_BT=case.entropy,
        **settings,
    )
    return differentiated(leaf_BT, loss)


# What is compared


@dataclass
class Line:
    what: str
    theirs: str
    differs: str
    """Why the two differ by design; empty: they must agree."""
    compute: Callable[[Case], tuple[list[Tensor], list[Tensor]]]
    """(own, theirs)"""
    case: dict[str, bool]


def lines() -> Iterator[Line]:
    def line(
        what: str,
        theirs: str,
        own: Callable[[Case], Any],
        other: Callable[[Case], Any],
        differs: str = "",
        **case: bool,
    ) -> Line:
        def both(one: Case) -> tuple[list[Tensor], list[Tensor]]:
            found = own(one), other(one)
            return tuple([v] if isinstance(v, Tensor) else v for v in found)  # type: ignore[return-value]

        return Line(what, theirs, differs, both, case)

    yield from verl_lines(line)
    yield from trl_lines(line)


def verl_lines(line: Callable[..., Line]) -> Iterator[Line]:
    def advantages(name: str, **settings: Any) -> Callable[[Case], Tensor]:
        return lambda c: public.verl_advantages(name, c.terminal, c.mask_BT, c.index_B, **settings)

    def own(algorithm: Any) -> Callable[[Case], Tensor]:
        return lambda c: own_advantages(algorithm, c)

    yield line("advantages: `grpo`", "verl `grpo`", own(Grpo()), advantages("grpo"))
    yield line(
        'advantages: `grpo`, `normalize = "none"`',
        "verl `norm_adv_by_std_in_grpo=False`",
        own(Grpo(normalize="none")),
        advantages("grpo", by_std=False),
    )
    yield line("advantages: `rloo`", "verl `rloo`", own(Rloo()), advantages("rloo"))
    yield line(
        "advantages: `reinforce_pp`, `gamma = 0.9`",
        "verl `reinforce_plus_plus`",
        own(ReinforcePp(gamma=0.9)),
        advantages("reinforce_plus_plus", gamma=0.9),
    )
    yield line(
        'advantages: `reinforce_pp`, `baseline = "group"`',
        "verl `reinforce_plus_plus_baseline`",
        own(ReinforcePp(baseline="group")),
        advantages("reinforce_plus_plus_baseline"),
    )

    def penalised(c: Case) -> Tensor:
        return c.terminal - 0.3 * (c.old - c.reference) * c.mask_BT

    yield line(
        "advantages: `reinforce_pp`, KL in the reward",
        "verl `reinforce_plus_plus`, `use_kl_in_reward`",
        own(ReinforcePp(kl_coef=0.3, gamma=0.9)),
        lambda c: public.verl_advantages(
            "reinforce_plus_plus", penalised(c), c.mask_BT, c.index_B, gamma=0.9
        ),
    )
    yield line(
        'advantages: `reinforce_pp`, `baseline = "group"`, KL in the reward',
        "verl `reinforce_plus_plus_baseline`, `use_kl_in_reward`",
        own(ReinforcePp(kl_coef=0.3, baseline="group")),
        lambda c: public.verl_advantages(
            "reinforce_plus_plus_baseline", penalised(c), c.mask_BT, c.index_B
        ),
        "verl sums the KL over the answer, before the group's mean is taken off; here each token "
        "bears the KL of the tokens from it on, as in OpenRLHF",
    )
    yield line(
        "advantages: `rloo`, KL in the reward",
        "verl `rloo`, `use_kl_in_reward`",
        own(Rloo(kl_coef=0.3)),
        lambda c: public.verl_advantages("rloo", penalised(c), c.mask_BT, c.index_B),
    )

    def gae(c: Case, part: int) -> Tensor:
        return public.verl_gae(c.terminal, c.values, c.mask_BT, 0.9, 0.8)[part] * c.mask_BT

    ppo = Ppo(gamma=0.9, gae_lambda=0.8)
    yield line("advantages: `ppo`, whitened", "verl `gae`", own(ppo), lambda c: gae(c, 0))
    yield line(
        "returns: `ppo`",
        "verl `gae`",
        lambda c: padded(ppo.credit(c.groups, "policy", scores_of(c)).returns or []),
        lambda c: gae(c, 1),
    )
    yield from verl_loss_lines(line)


def verl_loss_lines(line: Callable[..., Line]) -> Iterator[Line]:
    def update(name: str, algorithm: Any, **settings: Any) -> Callable[[Case], list[Tensor]]:
        return lambda c: verl_update(name, algorithm, c, **settings)

    def own(algorithm: Any) -> Callable[[Case], list[Tensor]]:
        return lambda c: own_update(algorithm, c)

    grpo = Grpo(clip_high=0.28, dual_clip=1.5)
    clip = {"high": 0.28, "dual": 1.5}
    yield line(
        'loss: `grpo`, dual clip, `loss_mean = "token"`',
        "verl `vanilla`, `token-mean`",
        own(grpo),
        update("vanilla", grpo, **clip),
        masked_row=True,
    )
    episode = Grpo(clip_high=0.28, dual_clip=1.5, loss_mean="episode")
    yield line(
        'loss: `grpo`, `loss_mean = "episode"`',
        "verl `vanilla`, `seq-mean-token-mean`",
        own(episode),
        update("vanilla", episode, mean="seq-mean-token-mean", **clip),
        masked_row=True,
    )
    constant = Grpo(normalize="none", loss_mean="constant", constant_tokens=7)
    yield line(
        'loss: `grpo`, `loss_mean = "constant"`',
        "verl `vanilla`, `seq-mean-token-sum-norm`",
        own(constant),
        update("vanilla", constant, mean="seq-mean-token-sum-norm", constant=7),
        masked_row=True,
    )
    gspo = Gspo(clip_low=0.05, clip_high=0.05)
    yield line(
        "loss: `gspo`",
        "verl `gspo`, `seq-mean-token-mean`",
        own(gspo),
        update("gspo", gspo, mean="seq-mean-token-mean", low=0.05, high=0.05),
        masked_row=True,
    )
    cispo = Cispo(clip_low=0.2, clip_high=0.28)
    yield line("loss: `cispo`", "verl `cispo`", own(cispo), update("cispo", cispo, high=0.28))
    for level, mode, low, high, threshold in (
        ("token", "truncate", None, 1.1, "1.1"),
        ("token", "mask", 0.9, 1.1, "0.9_1.1"),
        ("sequence", "truncate", None, 1.2, "1.2"),
        ("sequence", "mask", 0.8, 1.2, "0.8_1.2"),
    ):
        corrected = Grpo(correction=Correction(level=level, mode=mode, low=low, high=high))
        yield line(
            f"loss: `grpo`, correction {level}, {mode}",
            f"verl `rollout_is={level}`, `rollout_is_threshold={threshold}`",
            own(corrected),
            lambda c, a=corrected, level=level, threshold=threshold: verl_update(
                "vanilla",
                a,
                c,
                weights_BT=public.verl_correction(c.old, c.behaviour, c.mask_BT, level, threshold),
            ),
            masked_row=True,
        )
    yield from verl_other_lines(line)


def verl_other_lines(line: Callable[..., Line]) -> Iterator[Line]:
    def kl(name: str) -> Callable[[Case], list[Tensor]]:
        def compute(c: Case) -> list[Tensor]:
            leaf_BT = c.leaf
            return differentiated(leaf_BT, public.verl_kl(leaf_BT, c.reference, c.mask_BT, name))

        return compute

    def own_kl(name: str) -> Callable[[Case], list[Tensor]]:
        def compute(c: Case) -> list[Tensor]:
            with_kl = own_update(Grpo(kl_coef=1.0, kl_estimator=name), c)
            return [a - b for a, b in zip(with_kl, own_update(Grpo(), c), strict=True)]

        return compute

    yield line("KL in the loss: `k2`", "verl `kl_loss_type=k2`", own_kl("k2"), kl("k2"))
    yield line(
        "KL in the loss: `k3`", "verl `kl_loss_type=low_var_kl`", own_kl("k3"), kl("low_var_kl")
    )
    yield line(
        "KL in the loss: `k1`",
        "verl `kl_loss_type=k1`",
        own_kl("k1"),
        kl("k1"),
        "k1's own gradient, which verl takes, averages to nothing; here it is k2's",
    )
    yield line("KL in the loss: `k1`", "verl `kl_loss_type=k1+`", own_kl("k1"), kl("k1+"))

    ppo = Ppo(gamma=0.9, gae_lambda=0.8)

    def value_loss(c: Case) -> list[Tensor]:
        leaf_BT = c.values_now.clone().requires_grad_()
        returns_BT = padded(ppo.credit(c.groups, "policy", scores_of(c)).returns or [])
        loss = public.verl_value_loss(leaf_BT, returns_BT, c.values, c.mask_BT, 0.2)
        return differentiated(leaf_BT, loss)

    yield line(
        "loss of the critic",
        "verl `compute_value_loss`",
        lambda c: own_update(ppo, c, ppo.critic),
        value_loss,
    )

    def distilled(c: Case) -> list[Tensor]:
        leaf_BT = c.leaf
        advantages_BT = c.reference - leaf_BT.detach()
        loss = public.verl_loss(
            "vanilla", leaf_BT, c.old, advantages_BT, c.mask_BT, "token-mean", dual=1e9
        )
        return differentiated(leaf_BT, loss)

    yield line(
        "loss: `distill`",
        "verl `distillation_loss.loss_mode=k1`, `use_policy_gradient`",
        lambda c: own_update(Distill(), c),
        distilled,
    )
    yield from top_k_lines(line)


def top_k_lines(line: Callable[..., Line]) -> Iterator[Line]:
    """Positions with a vocabulary of 6; the teacher's 5 most likely tokens, or all of them."""

    def logits(c: Case) -> tuple[Tensor, Tensor]:
        flat = torch.cat([c.logprobs, c.reference, c.values, c.entropy], 1).flatten()
        size = len(flat) // 12 * 6
        return flat[:size].reshape(-1, 6).clone().requires_grad_(), flat[-size:].reshape(-1, 6)

    def both(c: Case, kept: int, *, own: bool) -> list[Tensor]:
        student_TV, teacher_TV = logits(c)
        teacher_TK, ids_TK = teacher_TV.log_softmax(-1).topk(kept, -1)
        if own:
            top_TK = student_TV.log_softmax(-1).gather(1, ids_TK)
            return differentiated(student_TV, top_k_kl(top_TK, teacher_TK, "teacher").mean())
        found_T = public.verl_top_k(student_TV, ids_TK, teacher_TK)
        return differentiated(student_TV, found_T.to(torch.float64).mean())

    yield line(
        "loss: `distill`, `top_k` of the whole vocabulary",
        "verl `forward_kl_topk`",
        lambda c: both(c, 6, own=True),
        lambda c: both(c, 6, own=False),
        "one of rounding: verl computes this loss in float32, and 1 - sum(p) is held above 1e-6 "
        "here (below 1e-5 each)",
    )
    yield line(
        "loss: `distill`, `top_k`",
        "verl `forward_kl_topk`",
        lambda c: both(c, 5, own=True),
        lambda c: both(c, 5, own=False),
        "verl leaves out the rest of the vocabulary, so its sum may be negative and is cut at 0",
    )


def trl_lines(line: Callable[..., Line]) -> Iterator[Line]:
    def own(algorithm: Any) -> Callable[[Case], list[Tensor]]:
        return lambda c: own_update(algorithm, c)

    def trl(algorithm: Any, **settings: Any) -> Callable[[Case], list[Tensor]]:
        return lambda c: trl_update(algorithm, c, **settings)

    dapo = Grpo(clip_high=0.28, kl_coef=0.1, dual_clip=1.5, entropy_coef=0.01)
    yield line(
        "loss: `grpo`, KL, entropy, dual clip",
        "TRL `loss_type=dapo`, `beta`, `delta`, `entropy_coef`",
        own(dapo),
        trl(dapo, epsilon_high=0.28, beta=0.1, delta=1.5, entropy_coef=0.01),
        masked_row=True,
    )
    yield line(
        "loss: `grpo`, KL",
        "TRL `beta`, `use_bias_correction_kl` (its default)",
        own(Grpo(kl_coef=0.1)),
        trl(Grpo(), beta=0.1, use_bias_correction_kl=True),
        "TRL multiplies the KL term by the ratio, with a gradient of its own; at the first update "
        "of a rollout the value is equal and the gradient is not",
    )
    episode = Grpo(loss_mean="episode")
    yield line(
        'loss: `grpo`, `loss_mean = "episode"`',
        "TRL `loss_type=grpo`",
        own(episode),
        trl(episode, loss_type="grpo"),
    )
    yield line(
        'loss: `grpo`, `loss_mean = "episode"`, an answer masked out',
        "TRL `loss_type=grpo`, `mask_truncated_completions`",
        own(episode),
        trl(episode, loss_type="grpo"),
        "TRL counts an answer without trained tokens in the denominator; here it is left out",
        masked_row=True,
    )
    constant = Grpo(normalize="none", loss_mean="constant", constant_tokens=7)
    yield line(
        'loss: `grpo`, `loss_mean = "constant"`',
        "TRL `loss_type=dr_grpo`",
        own(constant),
        trl(constant, loss_type="dr_grpo", max_completion_length=7),
    )
    gspo = Gspo(clip_low=0.05, clip_high=0.05)
    yield line(
        "loss: `gspo`",
        "TRL `importance_sampling_level=sequence`, `loss_type=grpo`",
        own(gspo),
        trl(
            gspo,
            loss_type="grpo",
            importance_sampling_level="sequence",
            epsilon=0.05,
            epsilon_high=0.05,
        ),
    )
    cispo = Cispo(clip_high=0.28)
    yield line(
        "loss: `cispo`",
        "TRL `loss_type=cispo`, `epsilon_high` = 1 + `clip_high`",
        own(cispo),
        trl(cispo, loss_type="cispo", epsilon_high=1.28),
    )
    yield from rloo_lines(line)


def rloo_lines(line: Callable[..., Line]) -> Iterator[Line]:
    rloo = Rloo(loss_mean="constant", constant_tokens=1)

    def gradient(c: Case) -> Tensor:
        return own_update(rloo, c)[1]

    def trl(c: Case) -> Tensor:
        leaf_BT = c.leaf
        advantages_B = own_advantages(rloo, c).sum(1) / c.mask_BT.sum(1)
        loss = public.trl_rloo_loss(leaf_BT, c.old, advantages_B, c.mask_BT)
        return differentiated(leaf_BT, loss)[1]

    yield line(
        "gradient: `rloo`, first update, `constant_tokens = 1`",
        "TRL `RLOOTrainer`",
        gradient,
        trl,
        on_policy=True,
    )
    yield line(
        "gradient: `rloo`, later update, `constant_tokens = 1`",
        "TRL `RLOOTrainer`",
        gradient,
        trl,
        "TRL clips the ratio of the whole answer (a product over its tokens), here each token's",
    )


def difference(own: list[Tensor], theirs: list[Tensor]) -> float:
    """Largest difference, relative to the largest number of each tensor."""
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-3))
        for a, b in zip(own, theirs, strict=True)
    )


def main() -> None:
    print(f"verl {version('verl')}, TRL {version('trl')}, torch {torch.__version__}\n")
    print("| here | there | largest difference | |\n|---|---|---|---|")
    failures = 0
    for line in lines():
        found = max(difference(*line.compute(make_case(seed, **line.case))) for seed in SEEDS)
        agrees = found < TOLERANCE
        failures += agrees == bool(line.differs)
        verdict = "agrees" if agrees else f"differs: {line.differs or 'UNEXPECTED'}"
        print(f"| {line.what} | {line.theirs} | {found:.0e} | {verdict} |")
    if failures:
        sys.exit(f"{failures} lines are not as expected")


if __name__ == "__main__":
    main()
