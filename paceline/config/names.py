"""Which name may have been meant."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

SYNONYMS: Mapping[str, str] = {
    "learning_rate": "trainer.lr",
    "lr_scheduler": "trainer.lr_schedule",
    "lr_scheduler_type": "trainer.lr_schedule",
    "warmup_steps": "trainer.lr_warmup_steps",
    "gradient_clipping": "trainer.max_grad_norm",
    "clip_grad": "trainer.max_grad_norm",
    "gradient_checkpointing": "trainer.activation_checkpointing",
    "max_new_tokens": "rollout.sampling.max_tokens",
    "max_response_length": "rollout.sampling.max_tokens",
    "max_steps": "run.num_steps",
    "steps": "run.num_steps",
    "num_rollout": "run.num_steps",
    "epochs": "run.num_epochs",
    "num_train_epochs": "run.num_epochs",
    "output_dir": "run.dir",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "teacher_model_name_or_path": "teacher.model.path",
    "torch_dtype": "model.dtype",
    "adv_estimator": "algorithm.kind",
    "advantage_estimator": "algorithm.kind",
    "policy_loss_type": "algorithm.kind",
    "loss_type": "algorithm.loss_mean",
    "loss_agg_mode": "algorithm.loss_mean",
    "loss_scale_factor": "algorithm.constant_tokens",
    "scale_rewards": "algorithm.normalize",
    "norm_adv_by_std_in_grpo": "algorithm.normalize",
    "beta": "algorithm.kl_coef",
    "kl_loss_coef": "algorithm.kl_coef",
    "init_kl_coef": "algorithm.kl_coef",
    "kl_loss_type": "algorithm.kl_estimator",
    "use_kl_loss": "algorithm.kl_in",
    "use_kl_in_reward": "algorithm.kl_in",
    "entropy_coeff": "algorithm.entropy_coef",
    "entropy_loss_coef": "algorithm.entropy_coef",
    "eps_clip": "algorithm.clip_low",
    "epsilon": "algorithm.clip_low",
    "clip_ratio_low": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "eps_clip_high": "algorithm.clip_high",
    "clip_ratio_high": "algorithm.clip_high",
    "delta": "algorithm.dual_clip",
    "eps_clip_c": "algorithm.dual_clip",
    "clip_ratio_c": "algorithm.dual_clip",
    "lam": "algorithm.gae_lambda",
    "lambd": "algorithm.gae_lambda",
    "cliprange_value": "algorithm.value_clip",
    "use_tis": "algorithm.correction",
    "tis_clip": "algorithm.correction.high",
    "rollout_is_threshold": "algorithm.correction.high",
    "critic_warmup": "critic.warmup_steps",
    "num_critic_only_steps": "critic.warmup_steps",
    "freezing_actor_steps": "critic.warmup_steps",
    "critic_learning_rate": "critic.lr",
    "num_generations": "rollout.samples_per_prompt",
    "n_samples_per_prompt": "rollout.samples_per_prompt",
    "num_iterations": "trainer.epochs_per_step",
    "ppo_epochs": "trainer.epochs_per_step",
    "num_steps_per_rollout": "trainer.updates_per_step",
    "check_weights": "weight_check.when",
    "check_weight_update_equal": "weight_check.when",
    "tensor_parallel_size": "engine.tensor_parallel",
    "tensor_model_parallel_size": "engine.tensor_parallel",
    "rollout_num_gpus_per_engine": "engine.tensor_parallel",
    "gpu_memory_utilization": "engine.memory_share",
    "mem_fraction_static": "engine.memory_share",
    "sglang_mem_fraction_static": "engine.memory_share",
    "fsdp_size": "trainer.ranks",
    "n_gpus_per_node": "trainer.ranks",
    "actor_num_gpus_per_node": "trainer.ranks",
}
"""Names that other systems give to a key."""


def nearest(word: str, names: Sequence[str], count: int = 1) -> list[str]:
    """Names that look like `word`, best first; case and dashes do not count.

    One with the same letters goes first: `gpro` is `grpo` mistyped, not `gspo`.
    """
    plain = {name.lower().replace("-", "_"): name for name in names}
    asked = word.lower().replace("-", "_")
    near = difflib.get_close_matches(asked, plain, max(1, len(plain)), cutoff=0.7)
    near.sort(key=lambda name: sorted(name) != sorted(asked))
    return [plain[name] for name in near[:count]]
