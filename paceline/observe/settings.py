"""`[observe]`: what a run shows and keeps besides `metrics.jsonl`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.types import Config


class ObserveConfig(Config):
    """`[observe]`: what a run shows and keeps. `metrics.jsonl` and `events.jsonl` always are."""

    console: Literal["auto", "rich", "plain", "off"] = "auto"
    """`rich`: a live view. `plain`: one line a step. `auto`: `rich` on a terminal that can show
    it, else `plain`. The numbers are those of `metrics.jsonl`, rounded to 4 digits."""
    tensorboard: bool = False
    """Write `tensorboard/` into the run's folder; needs the extra `tensorboard`."""
    wandb: Annotated[str, Field(min_length=1)] | None = None
    """Project of Weights & Biases to write to; needs the extra `wandb`. Absent: none."""
    samples: Literal["all", "none"] = "all"
    """`all`: keep the samples of every step, and the answers to eval sets, in `samples/`, for
    `paceline inspect` and `paceline replay`."""
    max_samples_per_step: Annotated[int, Field(ge=1)] | None = None
    """Keep at most this many samples of a step, and of an eval set, in the order of their draws;
    absent: all. Up to about 10 bytes a token on disk. A step can be replayed only with all."""
