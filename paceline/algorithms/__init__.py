"""Algorithms: one file each, named in one table."""

from paceline.algorithms.grpo import Grpo
from paceline.algorithms.sft import Sft

ALGORITHMS: dict[str, type[Grpo] | type[Sft]] = {
    "grpo": Grpo,
    "sft": Sft,
}
"""kind -> the frozen config class that is also the code."""
