"""Lets an unpatched SGLang run beside a torch that was built for CPUs only.

Imported when the interpreter starts, by the .pth file that scripts/setup-sglang writes. It acts
when the modules concerned are first imported:

torchvision        PyPI's wheel is built for CUDA, and its compiled part does not load here. Two
                   operators of it are looked up at import: they are declared, and never called.
sglang.srt.lora    asks for pinned memory without looking for a GPU, which such a torch refuses.
"""

from __future__ import annotations

import functools
import importlib.abc
import sys
from collections.abc import Callable
from typing import Any

OPERATORS = "torchvision::nms", "torchvision::qnms"
BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_operators() -> None:
    import torch

    for operator in OPERATORS:
        torch.library.define(operator, BOXES)


def ignore_pinning() -> None:
    import torch

    def without_pinning(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*values: Any, **options: Any) -> Any:
            options.pop("pin_memory", None)
            return function(*values, **options)

        return call

    for name in ("tensor", "empty", "zeros", "ones", "arange"):
        setattr(torch, name, without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self


class BeforeImport(importlib.abc.MetaPathFinder):
    """Finds nothing; acts once, when a module is first looked for."""

    def __init__(self, actions: dict[str, Callable[[], None]]) -> None:
        self._actions = actions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        action = self._actions.pop(name, None)
        if action is not None:
            action()


sys.meta_path.insert(
    0, BeforeImport({"torchvision": declare_operators, "sglang.srt.lora": ignore_pinning})
)
