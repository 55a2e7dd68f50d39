"""`[cluster]`: where processes run. Loads neither ray nor torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.types import Config


class ClusterConfig(Config):
    """`[cluster]`: what starts the processes of trainers and servers, and on which devices."""

    runtime: Literal["local", "ray"] = "local"
    """`local`: child processes on this machine. `ray`: actors of a Ray cluster."""
    address: str | None = None
    """With `ray`: the cluster to join, `auto` for one that runs on this machine; default: the one
    that RAY_ADDRESS names, else one is started here and ended with the run."""
    colocate: bool = True
    """Engine and trainer of a policy share devices; see `[memory]`. False: each has its own."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Seconds that all workers of a group may take to start."""
    call_timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds that one call of a worker may take before the run ends."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of all workers, on every node."""
