"""What is compared with TRL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import public_losses as public
from public_cases import Case, Line, Tensor, differentiated, line, own_advantages, own_update

from paceline.algorithms.cispo import Cispo
from paceline.algorithms.grpo import Grpo
from paceline.algorithms.gspo import Gspo
from paceline.algorithms.rloo import Rloo


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


def trl_lines() -> Iterator[Line]:
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
    yield from rloo_lines()


def rloo_lines() -> Iterator[Line]:
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
