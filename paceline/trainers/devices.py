"""Which device a run file means."""

from __future__ import annotations

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
