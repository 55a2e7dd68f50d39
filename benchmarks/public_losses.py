"""The public loss functions of verl and TRL, called on padded batches.

verl's are functions. TRL's are methods of its trainers: they run on a stand-in that holds the
settings and gives out the log-probs which a model would have computed.

Legend: B rows, T positions.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

with redirect_stdout(StringIO()):
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer
    from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
    from verl.workers.config import ActorConfig

Tensor = torch.Tensor


# verl


def verl_advantages(
    name: str, rewards_BT: Tensor, mask_BT: Tensor, index_B: np.ndarray, **settings: Any
) -> Tensor:
    """Advantages of an outcome estimator, by its name in `algorithm.adv_estimator`."""
    estimate = core_algos.get_adv_estimator_fn(name)
    if name.startswith("grpo"):
        given = {"norm_adv_by_std_in_grpo": settings.get("by_std", True)}
    else:
        given = {"config": SimpleNamespace(gamma=settings.get("gamma", 1.0))}
    advantages_BT, _ = estimate(rewards_BT.clone(), mask_BT, index=index_B, **given)
    return advantages_BT


def verl_gae(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    return core_algos.compute_gae_advantage_return(rewards_BT, values_BT, mask_BT, gamma, lam)


def verl_loss(
    name: str,
    logprobs_BT: Tensor,
    old_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    mean: str,
    weights_BT: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """A policy loss by its name in `actor.policy_loss.loss_mode`."""
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=settings.get("low", 0.2),
        clip_ratio_high=settings.get("high", 0.2),
        clip_ratio_c=settings.get("dual", 1e9),
        loss_agg_mode=mean,
        loss_scale_factor=settings.get("constant"),
    )
    config.global_batch_info["loss_scale_factor"] = settings.get("constant")
    loss, _ = core_algos.get_policy_loss_fn(name)(
        old_BT, logprobs_BT, advantages_BT, mask_BT, mean, config, weights_BT
    )
    return loss


def verl_kl(logprobs_BT: Tensor, reference_BT: Tensor, mask_BT: Tensor, name: str) -> Tensor:
    kl_BT = core_algos.kl_penalty(logprobs_BT, reference_BT, name)
    return core_algos.agg_loss(kl_BT, mask_BT, "token-mean")


def verl_value_loss(
    values_BT: Tensor, returns_BT: Tensor, old_BT: Tensor, mask_BT: Tensor, clip: float
) -> Tensor:
    loss, _ = core_algos.compute_value_loss(values_BT, returns_BT, old_BT, mask_BT, clip)
    return loss


def verl_correction(
    old_BT: Tensor, behaviour_BT: Tensor, mask_BT: Tensor, level: str, threshold: str
) -> Tensor:
    """`algorithm.rollout_correction`; threshold: `high`, or `low_high` for its mask."""
    log_ratio_BT = old_BT - behaviour_BT
    weights_BT, _ = compute_rollout_correction_weights(log_ratio_BT, mask_BT, level, threshold)
    return weights_BT


def verl_top_k(logits_TV: Tensor, teacher_ids_TK: Tensor, teacher_TK: Tensor) -> Tensor:
    """`distillation_loss.loss_mode = forward_kl_topk`, one number a position."""
    settings = SimpleNamespace(log_prob_min_clamp=None, use_chunked_topk=False)
    found = compute_forward_kl_topk(
        logits_TV[None],
        torch.nested.nested_tensor([teacher_TK], layout=torch.jagged),
        torch.nested.nested_tensor([teacher_ids_TK], layout=torch.jagged),
        SimpleNamespace(distillation_loss=settings),
        "thd",
    )
    return found["distillation_losses"][0]


# TRL


class _Alone:
    """An accelerator of one process."""

    num_processes = 1
    sync_gradients = False

    def gather(self, values: Tensor) -> Tensor:
        return values

    def reduce(self, values: Tensor, reduction: str) -> Tensor:
        return values


def trl_loss(
    logprobs_BT: Tensor,
    old_BT: Tensor,
    advantages_B: Tensor,
    mask_BT: Tensor,
    *,
    reference_BT: Tensor | None = None,
    entropy_BT: Tensor | None = None,
    weights_BT: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """`GRPOTrainer`'s loss, with settings by the names of `GRPOConfig`."""
    kind = settings.get("loss_type", "dapo")
    stand_in = _stand_in(logprobs_BT, entropy_BT, settings)
    stand_in.loss_type = kind
    stand_in.importance_sampling_level = settings.get("importance_sampling_level", "token")
    stand_in.beta = settings.get("beta", 0.0)
    stand_in.entropy_coef = settings.get("entropy_coef", 0.0)
    stand_in._entropy_bonus_enabled = stand_in.entropy_coef != 0
    stand_in.max_completion_length = settings.get("max_completion_length")
    stand_in.use_vllm = stand_in.vllm_importance_sampling_correction = weights_BT is not None
    inputs = _trl_inputs(mask_BT) | {
        "advantages": advantages_B,
        "old_per_token_logps": old_BT,
        "ref_per_token_logps": reference_BT,
        "importance_sampling_ratio": weights_BT,
        "num_items_in_batch": mask_BT.sum(),
    }
    return GRPOTrainer._compute_loss(stand_in, None, inputs)


def trl_rloo_loss(
    logprobs_BT: Tensor, old_BT: Tensor, advantages_B: Tensor, mask_BT: Tensor, **settings: Any
) -> Tensor:
    """`RLOOTrainer`'s loss."""
    stand_in = _stand_in(logprobs_BT, None, settings)
    inputs = _trl_inputs(mask_BT)
    inputs |= {"advantages": advantages_B, "old_logps": (old_BT * mask_BT).sum(1)}
    return RLOOTrainer._compute_loss(stand_in, None, inputs)


def _stand_in(logprobs_BT: Tensor, entropy_BT: Tensor | None, settings: dict[str, Any]) -> Any:
    entropy_BT = torch.zeros_like(logprobs_BT) if entropy_BT is None else entropy_BT
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs_BT, entropy_BT, None),
        model=SimpleNamespace(training=True),
        accelerator=_Alone(),
        args=SimpleNamespace(
            delta=settings.get("delta"),
            use_bias_correction_kl=settings.get("use_bias_correction_kl", False),
            steps_per_generation=1,
        ),
        epsilon_low=settings.get("epsilon", 0.2),
        epsilon_high=settings.get("epsilon_high", 0.2),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_adaptive_entropy=False,
        current_gradient_accumulation_steps=1,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )


def _trl_inputs(mask_BT: Tensor) -> dict[str, Any]:
    ids_BT = torch.zeros(mask_BT.shape, dtype=torch.int64)
    return {
        "prompt_ids": ids_BT[:, :1],
        "prompt_mask": ids_BT[:, :1] + 1,
        "completion_ids": ids_BT,
        "completion_mask": mask_BT,
    }
