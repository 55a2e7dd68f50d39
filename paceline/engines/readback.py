"""The weight check of a server: its tensors are read back, as numbers, and compared.

A server shows a tensor as JSON, which takes time and memory, so that of a large model some tensors
are compared only: of each kind (the name without its layer) the first, then the last, and so on
until the budget is used up. That finds what goes wrong in a mapping of names, in fused and in tied
weights; it does not find a single broken number somewhere.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from paceline.errors import WeightError
from paceline.weights.base import TensorInfo
from paceline.weights.check import covered
from paceline.weights.settings import EXACT, WeightCheckConfig
from paceline.weights.tensors import checksums, relative_error

logger = logging.getLogger(__name__)

MOST_NUMBERS = 8_000_000
"""Numbers that are read back in one check, about 160 MB of JSON."""
NUMBER = re.compile(r"\d+")

Read = Callable[[TensorInfo], Awaitable["list[float] | None"]]
"""The numbers of a tensor, flat; None if the server does not show it."""
Numbers = Callable[[Sequence[str]], Awaitable[Mapping[str, Tensor]]]
"""Some of the sender's tensors."""


async def differences(
    read: Read,
    sent: Mapping[str, str],
    tensors: Mapping[str, TensorInfo],
    numbers: Numbers,
    check: WeightCheckConfig = EXACT,
) -> list[str]:
    """Names of tensors that differ from the sender's, or are not there.

    sent: name -> hash, see `weights.tensors.checksums`. tensors: all that came in parcels.
    numbers: the sender's own, for a tolerance. Raises WeightError if the server shows none.
    """
    names = covered(sent, check)
    chosen = choose(tensors[name] for name in names if name in tensors)
    wrong: dict[str, Tensor | None] = {}
    never_sent = [name for name in names if name not in tensors]
    absent: list[str] = []
    for info in chosen:
        found = await read(info)  # ends: by the time limits of its replica
        if found is None:
            absent.append(info.name)
            continue
        held = await asyncio.to_thread(_tensor, info, found)
        if held is None or checksums({info.name: held})[info.name] != sent[info.name]:
            wrong[info.name] = held
    if chosen and len(absent) == len(chosen):
        raise WeightError(
            "the server does not show the weights of this model, so they can not be compared; set "
            'weight_check.when = "never"'
        )
    if len(chosen) < len(names):
        logger.info("weight check: %d of %d tensors compared", len(chosen), len(names))
    if check.tolerance and wrong:
        return [*await _beyond(wrong, numbers, check.tolerance), *absent, *never_sent]
    return [*wrong, *absent, *never_sent]


async def _beyond(
    held: Mapping[str, Tensor | None], numbers: Numbers, tolerance: float
) -> list[str]:
    """Those that are further off, each with its error."""
    sent, found = await numbers(list(held)), []
    for name, tensor in held.items():
        error = float("inf") if tensor is None else relative_error(tensor, sent[name])
        if not error <= tolerance:
            found.append(f"{name} (relative error {error:.2g})")
    return found


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


def _tensor(info: TensorInfo, numbers: list[float]) -> Tensor | None:
    """As it was sent; None if the shape is another."""
    if len(numbers) != prod(info.shape):
        return None
    tensor = torch.tensor(numbers, dtype=torch.float32).view(info.shape)
    return tensor.to(getattr(torch, info.dtype))
