"""`[weight_check]`: whether engines hold what their trainers sent."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field

from paceline.types import Config

Globs = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)]


class WeightCheckConfig(Config):
    """`[weight_check]`: after a publish, compare what the engine holds with what was sent."""

    when: Literal["never", "first", "always"] = "never"
    """After which publishes: `first`: the first of every start; `always`: each. A difference ends
    the run and names the tensors. Of a large model, a server is asked for some tensors of each
    kind, first and last layers before those between."""
    only: Globs = ()
    """Compare these tensors alone: names as the error and a Hugging Face checkpoint have them,
    with `*` for anything, such as `"*.mlp.*"`. A pattern must name at least one."""
    skip: Globs = ()
    """Leave these tensors out, by the same patterns; a reset leaves them as they are."""
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Largest relative error of a tensor: the norm of the difference, divided by that of what was
    sent. 0 compares bit for bit. For engines that round what they get, by quantization or by
    `engine.dtype`: bfloat16 needs 0.004, 8 bits about 0.05."""
    reset: bool = False
    """Before a publish that is checked, fill the engine's weights with other numbers, so that a
    tensor that is never written shows. Has no effect where the engine shares the trainer's own
    parameters."""

    def covers(self, name: str) -> bool:
        """Whether the tensor is compared."""
        return (not self.only or _is_among(name, self.only)) and not self.skips(name)

    def skips(self, name: str) -> bool:
        """Whether the tensor is left out."""
        return _is_among(name, self.skip)


EXACT = WeightCheckConfig()
"""All tensors, bit for bit."""


def _is_among(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
