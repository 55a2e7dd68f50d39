"""What is compared with verl."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import public_losses as public
import torch
from public_cases import (
    Case,
    Line,
    Tensor,
    differentiated,
    line,
    own_advantages,
    own_update,
    padded,
    scores_of,
)

from paceline.algorithms.cispo import Cispo
from paceline.algorithms.correction import Correction
from paceline.algorithms.distill import Distill, top_k_kl
from paceline.algorithms.grpo import Grpo
from paceline.algorithms.gspo import Gspo
from paceline.algorithms.ppo import Ppo
from paceline.algorithms.reinforce_pp import ReinforcePp
from paceline.algorithms.rloo import Rloo

WHITENING = "whitening divides by std + 1e-6 here, by sqrt(var + 1e-8) there"


def verl_update(
    name: str, algorithm: Any, case: Case, mean: str = "token-mean", **settings: Any
) -> list[Tensor]:
    leaf_BT = case.leaf
    advantages_BT = own_advantages(algorithm, case)
    loss = public.verl_loss(name, leaf_BT, case.old, advantages_BT, case.mask_BT, mean, **settings)
    return differentiated(leaf_BT, loss)


def verl_lines() -> Iterator[Line]:
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
    yield line(
        "advantages: `grpo`, one answer a prompt",
        "verl `grpo`",
        own(Grpo()),
        advantages("grpo"),
        "verl takes the reward as it is, without baseline; here it is 0, counted, and a run file "
        "that asks for it is refused",
        single=True,
    )
    yield line("advantages: `rloo`", "verl `rloo`", own(Rloo()), advantages("rloo"))
    yield line(
        "advantages: `reinforce_pp`, `gamma = 0.9`",
        "verl `reinforce_plus_plus`",
        own(ReinforcePp(gamma=0.9)),
        advantages("reinforce_plus_plus", gamma=0.9),
        rounds=WHITENING,
    )
    yield line(
        'advantages: `reinforce_pp`, `baseline = "group"`',
        "verl `reinforce_plus_plus_baseline`",
        own(ReinforcePp(baseline="group")),
        advantages("reinforce_plus_plus_baseline"),
        rounds=WHITENING,
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
        rounds=WHITENING,
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
    yield line(
        "advantages: `ppo`, whitened",
        "verl `gae`",
        own(ppo),
        lambda c: gae(c, 0),
        rounds=WHITENING,
    )
    yield line(
        "returns: `ppo`",
        "verl `gae`",
        lambda c: padded(ppo.credit(c.groups, "policy", scores_of(c)).returns or []),
        lambda c: gae(c, 1),
    )
    yield from verl_loss_lines()


def verl_loss_lines() -> Iterator[Line]:
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
    yield from verl_other_lines()


def verl_other_lines() -> Iterator[Line]:
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
    yield from top_k_lines()


def top_k_lines() -> Iterator[Line]:
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
        rounds="verl computes in float32, and the rest of the vocabulary counts as 1e-6 here",
    )
    yield line(
        "loss: `distill`, `top_k`",
        "verl `forward_kl_topk`",
        lambda c: both(c, 5, own=True),
        lambda c: both(c, 5, own=False),
        "verl leaves out the rest of the vocabulary, so its sum may be negative and is cut at 0",
    )
