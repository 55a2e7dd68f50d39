"""Stands in for SGLang's compiled kernels, which have no build for plain CPUs on PyPI.

SGLang imports some of them by name at its start and calls none without a GPU or AMX: whatever is
asked for is there, and says so if it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not there: SGLang runs without kernels")

    return absent
