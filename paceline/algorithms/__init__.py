"""Algorithms: one file each, named in one table."""

from paceline.algorithms.base import Algorithm
from paceline.algorithms.cispo import Cispo
from paceline.algorithms.distill import Distill
from paceline.algorithms.grpo import Grpo
from paceline.algorithms.gspo import Gspo
from paceline.algorithms.ppo import Ppo
from paceline.algorithms.reinforce_pp import ReinforcePp
from paceline.algorithms.rloo import Rloo
from paceline.algorithms.sft import Sft

ALGORITHMS: dict[str, type[Algorithm]] = {
    "grpo": Grpo,
    "rloo": Rloo,
    "reinforce_pp": ReinforcePp,
    "ppo": Ppo,
    "gspo": Gspo,
    "cispo": Cispo,
    "distill": Distill,
    "sft": Sft,
}
"""kind -> the frozen config class that is also the code."""
