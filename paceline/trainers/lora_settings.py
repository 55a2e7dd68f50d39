"""`[trainer.lora]`: training adapters in the place of a model's weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.types import Config

Target = Annotated[str, Field(min_length=1)]
Targets = Annotated[tuple[Target, ...], Field(strict=False, min_length=1)]


class LoraConfig(Config):
    """`[trainer.lora]`: train a low-rank adapter, and leave the model's weights as they are.

    Each chosen matrix W becomes W + scale B A; A is drawn from the run's seed, B is zero at first.
    Both are held in float32, whatever `model.dtype` is.
    """

    rank: Annotated[int, Field(ge=1)] = 16
    """Rows of A and columns of B."""
    alpha: Annotated[int, Field(ge=1)] | None = None
    """Numerator of the scale, `alpha / rank`; absent: twice the rank."""
    rslora: bool = False
    """Scale by `alpha / sqrt(rank)`, so that a large rank does not learn more slowly."""
    targets: Literal["all-linear"] | Targets = "all-linear"
    """Which linear layers get an adapter: `all-linear`, all but the head over the vocabulary; or a
    list of names, such as `["q_proj", "v_proj"]`, each of a layer or of the end of its path.
    Experts that a mixture holds in one tensor are no linear layers, and stay as they are."""

    @property
    def resolved_alpha(self) -> int:
        return 2 * self.rank if self.alpha is None else self.alpha
