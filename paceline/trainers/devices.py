"""Which device a run file means, and kernels whose sums do not depend on chance."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """`auto` is the first GPU, or the CPU. Raises ConfigError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"trainer.device = {name!r}: allowed are auto, cpu, cuda and cuda:N")
    if device.type == "cuda" and (device.index or 0) >= found:
        raise ConfigError(
            f"trainer.device = {name!r}, but torch sees {found} CUDA devices; use `auto` or `cpu`, "
            "or install a torch build with CUDA"
        )
    return device


@contextmanager
def fixed_order() -> Iterator[None]:
    """Within it, CUDA kernels that add in an order of chance are replaced, or raise.

    The switch is the process's: what else runs on the GPU meanwhile is held to it as well.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    was_on = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned_only)
