"""Algorithms with settings that reach every branch, each mean and each shared part, by name."""

from __future__ import annotations

from typing import Any

from batches import NUM_TOP

from paceline.algorithms import ALGORITHMS
from paceline.algorithms.base import Algorithm
from paceline.algorithms.correction import Correction

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "grpo, dapo": ("grpo", {"clip_high": 0.28, "entropy_coef": 0.01}),
    "grpo, dr_grpo": ("grpo", {"normalize": "none"}),
    "grpo, kl and dual clip": ("grpo", {"kl_coef": 0.1, "dual_clip": 1.1, "clip_low": 0.05}),
    "grpo, k2": ("grpo", {"kl_coef": 0.2, "kl_estimator": "k2"}),
    "rloo": ("rloo", {"dual_clip": 1.3}),
    "rloo, kl in reward": ("rloo", {"kl_coef": 0.3}),
    "rloo, kl in loss": ("rloo", {"kl_coef": 0.3, "kl_in": "loss", "entropy_coef": 0.02}),
    "rloo, running": ("rloo", {"baseline": "running", "kl_coef": 0.3}),
    "reinforce_pp": ("reinforce_pp", {}),
    "reinforce_pp, running": ("reinforce_pp", {"baseline": "running", "gamma": 0.9}),
    "reinforce_pp, kl in reward": ("reinforce_pp", {"kl_coef": 0.3, "gamma": 0.9}),
    "reinforce_pp, baseline": (
        "reinforce_pp",
        {"baseline": "group", "kl_coef": 0.2, "kl_estimator": "k3"},
    ),
    "reinforce_pp, kl in loss": (
        "reinforce_pp",
        {"baseline": "group", "kl_coef": 0.2, "kl_estimator": "k2", "kl_in": "loss"},
    ),
    "ppo": ("ppo", {}),
    "ppo, discounted": ("ppo", {"gamma": 0.9, "gae_lambda": 0.7, "bootstrap_truncated": True}),
    "ppo, kl in reward": (
        "ppo",
        {"kl_coef": 0.2, "kl_estimator": "k2", "whiten_advantages": False, "value_clip": 0.05},
    ),
    "ppo, kl in loss": (
        "ppo",
        {"kl_coef": 0.2, "kl_in": "loss", "gae_lambda": 0.95, "value_clip": None},
    ),
    "gspo": ("gspo", {}),
    "gspo, wide": ("gspo", {"clip_low": 0.1, "clip_high": 0.1, "kl_coef": 0.1, "dual_clip": 1.2}),
    "cispo": ("cispo", {}),
    "cispo, tight": ("cispo", {"clip_low": 0.1, "clip_high": 0.2, "kl_coef": 0.1}),
    "distill": ("distill", {}),
    "distill, rewards": ("distill", {"reward_coef": 0.5, "kl_coef": 0.1, "dual_clip": 2.0}),
    "distill, top k": ("distill", {"top_k": NUM_TOP, "reward_coef": 0.5}),
    "distill, top k of the teacher": (
        "distill",
        {"top_k": NUM_TOP, "top_k_weights": "teacher", "entropy_coef": 0.1},
    ),
    "correction, token": ("grpo", {"correction": Correction(high=1.01)}),
    "correction, token mask": (
        "cispo",
        {"correction": Correction(mode="mask", low=0.97, high=1.03)},
    ),
    "correction, sequence": (
        "rloo",
        {"correction": Correction(level="sequence", mode="clip", low=0.9, high=1.1, veto=0.95)},
    ),
    "correction, geometric": (
        "gspo",
        {"correction": Correction(level="geometric", mode="mask", low=0.98, high=1.02)},
    ),
    "correction, geometric truncate": (
        "ppo",
        {"correction": Correction(level="geometric", high=1.0, veto=0.95)},
    ),
}

NEEDS_WHOLE_ROWS = {
    name
    for name, (kind, settings) in VARIANTS.items()
    if kind == "gspo"
    or (
        (c := settings.get("correction")) is not None and (c.level != "token" or c.veto is not None)
    )
}

MEANS: dict[str, dict[str, Any]] = {
    "token": {"loss_mean": "token"},
    "episode": {"loss_mean": "episode"},
    "constant": {"loss_mean": "constant", "constant_tokens": 7},
}

MEANS_OF: list[tuple[str, str]] = [(name, mean) for name in VARIANTS for mean in MEANS]


def make_algorithm(name: str, mean: str = "token") -> Algorithm:
    kind, settings = VARIANTS[name]
    make: Any = ALGORITHMS[kind]
    return make(**settings, **MEANS[mean])
