"""Learning rates as functions of the update's number. No state: a resumed run reads the same ones.

An update is an optimizer step that moved the weights; the first is number 0.
"""

from __future__ import annotations

import math
from typing import Literal

Shape = Literal["constant", "linear", "cosine"]


def learning_rate(
    update: int,
    *,
    peak: float,
    shape: Shape = "constant",
    warmup: int = 0,
    horizon: int = 0,
    min_ratio: float = 0.0,
) -> float:
    """Learning rate of the update with this number.

    Warm-up: update k (from 0) of `warmup` uses (k+1)/warmup of the peak, so that none is wasted
    on a rate of 0. After it, with p = (update - warmup) / (horizon - warmup), held at 1:

        constant: peak
        linear:   peak * (1 - (1 - min_ratio) * p)
        cosine:   peak * (min_ratio + (1 - min_ratio) * (1 + cos(pi * p)) / 2)

    The first update after warm-up uses the peak; `min_ratio * peak` is reached at `horizon`, the
    update after the run's last, so that no update is wasted at a rate of 0 here either.
    """
    if update < warmup:
        return peak * (update + 1) / warmup
    if shape == "constant":
        return peak
    progress = min(1.0, (update - warmup) / max(1, horizon - warmup))
    match shape:
        case "linear":
            share = 1.0 - progress
        case "cosine":
            share = (1.0 + math.cos(math.pi * progress)) / 2.0
    return peak * (min_ratio + (1.0 - min_ratio) * share)
