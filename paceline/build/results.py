"""What the entry points give back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.evals import EvalResult
from paceline.types import Sample


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended."""

    run_dir: Path
    step: int
    """The last finished step, over all restarts."""
    version: int
    """Optimizer steps done, over all restarts."""
    first_evals: dict[str, float] = field(default_factory=dict)
    """Metric -> value of this process's first eval; before training, in a fresh run."""
    evals: dict[str, float] = field(default_factory=dict)
    """Metric -> value of its last eval."""
    model_path: Path | None = None
    """The leader's model of the last checkpoint, in Hugging Face format; None if none was made."""
    model_paths: dict[str, Path] = field(default_factory=dict)
    """The same of every policy that learns, by name."""
    samples: list[Sample] = field(default_factory=list)
    """The last step's samples."""


@dataclass(frozen=True, slots=True)
class EvalReport:
    """What `evaluate` measured."""

    weights: str
    """The model or checkpoint that was measured."""
    values: dict[str, float]
    """Metric -> value, such as `eval/heldout/reward`."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Eval set -> why it has no numbers."""
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    """Eval set -> its answers."""

    @classmethod
    def of(cls, weights: str, results: Sequence[EvalResult]) -> EvalReport:
        """What the sets gave."""
        return cls(
            weights=weights,
            values={name: v for r in results for name, v in r.metrics().values().items()},
            skipped={r.name: r.skipped for r in results if r.skipped is not None},
            samples={r.name: [s for group in r.groups for s in group.samples()] for r in results},
        )
