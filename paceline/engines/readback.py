"""The weight check of a server: its tensors are read back, as numbers, and compared bit for bit.

A server shows a tensor as JSON, which takes time and memory, so that of a large model some tensors
are compared only: of each kind (the name without its layer) the first, then the last, and so on
until the budget is used up. That finds what goes wrong in a mapping of names, in fused and in tied
weights; it does not find a single broken number somewhere.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from math import prod

import torch

from paceline.errors import WeightError
from paceline.weights.base import TensorInfo
from paceline.weights.tensors import checksums

logger = logging.getLogger(__name__)

MOST_NUMBERS = 8_000_000
"""Numbers that are read back in one check, about 160 MB of JSON."""
NUMBER = re.compile(r"\d+")

Read = Callable[[TensorInfo], Awaitable["list[float] | None"]]
"""The numbers of a tensor, flat; None if the server does not show it."""


async def differences(
    read: Read, sent: Mapping[str, str], tensors: Mapping[str, TensorInfo]
) -> list[str]:
    """Names of tensors that differ from the sender's, or are not there.

    sent: name -> hash, see `weights.tensors.checksums`. tensors: all that were sent. Raises
    WeightError if the server shows none.
    """
    chosen = choose(tensors[name] for name in sent if name in tensors)
    wrong: list[str] = []
    absent: list[str] = []
    for info in chosen:
        found = await read(info)  # ends: by the time limits of its replica
        if found is None:
            absent.append(info.name)
        elif await asyncio.to_thread(_hash, info, found) != sent[info.name]:
            wrong.append(info.name)
    if len(absent) == len(chosen):
        raise WeightError(
            "the server does not show the weights of this model, so they can not be compared; set "
            'run.check_weights = "never"'
        )
    if len(chosen) < len(sent):
        logger.info("weight check: %d of %d tensors compared", len(chosen), len(sent))
    return wrong + absent


def choose(tensors: Iterable[TensorInfo], most_numbers: int = MOST_NUMBERS) -> list[TensorInfo]:
    """Some of each kind, first and last layers before those between."""
    kinds: dict[str, list[TensorInfo]] = {}
    for info in tensors:
        kinds.setdefault(NUMBER.sub("*", info.name), []).append(info)
    chosen: list[TensorInfo] = []
    turn = 0
    while any(kinds.values()):
        for members in kinds.values():
            if members:
                info = members.pop(0 if turn % 2 == 0 else -1)
                count = prod(info.shape)
                if count <= most_numbers:
                    chosen.append(info)
                    most_numbers -= count
        turn += 1
    return chosen


def _hash(info: TensorInfo, numbers: list[float]) -> str | None:
    if len(numbers) != prod(info.shape):
        return None
    tensor = torch.tensor(numbers, dtype=torch.float32).view(info.shape)
    return checksums({info.name: tensor.to(getattr(torch, info.dtype))})[info.name]
