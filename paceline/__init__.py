"""Paceline: reinforcement-learning post-training for language models.

    import paceline
    result = paceline.train("path/to/model", ["1+1=", "2+3="], reward, num_steps=20)

Nothing heavy is imported before one of these functions is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.api import evaluate, generate, sft, train

    __version__: str

__all__ = ["__version__", "evaluate", "generate", "sft", "train"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("paceline")
    if name in __all__:
        from paceline import api

        return getattr(api, name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
