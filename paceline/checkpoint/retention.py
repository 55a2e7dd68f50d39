"""Which checkpoints stay. Pure: the store does the deleting."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from paceline.checkpoint_settings import CheckpointConfig


@dataclass(frozen=True, slots=True)
class Best:
    """The best checkpoint by `checkpoint.best_metric`."""

    step: int
    value: float


def rank(scores: Mapping[int, float], config: CheckpointConfig) -> list[Best]:
    """Best first; of equals the earliest. A score that is no number does not compete."""
    sign = -1 if config.best_mode == "max" else 1
    entries = [Best(step, value) for step, value in scores.items() if not math.isnan(value)]
    return sorted(entries, key=lambda best: (sign * best.value, best.step))


def steps_to_keep(
    complete: Collection[int], scores: Mapping[int, float], config: CheckpointConfig
) -> set[int]:
    """The newest `keep_last` and the best `keep_best` of the complete checkpoints."""
    ranked = rank({step: scores[step] for step in complete if step in scores}, config)
    best = ranked[: config.keep_best] if config.best_metric is not None else []
    return set(sorted(complete)[-config.keep_last :]) | {entry.step for entry in best}
