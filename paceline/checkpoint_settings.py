"""`[checkpoint]`: when a run is saved and which checkpoints stay."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import Field, field_validator

from paceline.observe.catalogue import describe, nearest
from paceline.types import Config

RUN_FILES = (
    "metrics.jsonl",
    "events.jsonl",
    "run.toml",
    "environment.json",
    "checkpoints",
    "samples",
)
"""What a run keeps in its folder; no other file may be called like these, or begin so."""


class CheckpointConfig(Config):
    """`[checkpoint]`: when a run is saved and which checkpoints stay."""

    every: Annotated[int, Field(ge=1)] | Literal["never"] = 10
    """Save after each so many steps, after the last one and, with `run.num_epochs`, at each epoch's
    end. `never`: not even after the last; `save_request_file` still works. What is lost when a run
    is killed is the work since the last save."""
    background: bool = True
    """Let the run go on while a checkpoint is written, hashed and brought to the disk; a step then
    stops for a copy of weights and moments in host memory alone, which is kept until they are
    written. One at a time: the next save, and the end of the run, wait for it. An error of it ends
    the run at the next step's end. `false`: a step stops until the checkpoint is durable, without a
    copy; for hosts that have no memory left for one. Results are the same bits."""
    keep_last: Annotated[int, Field(ge=1)] = 2
    """How many of the newest checkpoints stay on disk. Two, so that a damaged one has a
    predecessor."""
    best_metric: str | None = None
    """Also keep the best checkpoint by this metric, such as `eval/heldout/reward`; `best.json`
    names it. A checkpoint competes if the metric was measured at its very step, so let
    `evals.every` be a multiple of `every`, or the reverse. Absent: none is kept for its score."""
    best_mode: Literal["max", "min"] = "max"
    """Whether more of `best_metric` is better, or less. Of equals the earliest is the best."""
    keep_best: Annotated[int, Field(ge=1)] = 1
    """How many of the best stay on disk, if `best_metric` is set."""
    save_request_file: Annotated[str, Field(min_length=1)] | None = "save"
    """Touching this file asks for a save at the end of the running step; a path in the run's
    folder, and none of the run's own files. The checkpoint is durable when neither it nor
    `<file>.claimed` is there any more."""
    verify: Literal["hash", "size"] = "hash"
    """What is compared before a checkpoint is trusted. `hash` reads all of it, 0.4 to 1
    GB/s a core; `size` only looks at the sizes of its files."""

    @field_validator("best_metric")
    @classmethod
    def _is_known(cls, name: str | None) -> str | None:
        if name is not None and describe(name) is None:
            close = nearest(name)
            hint = f"; nearest: {', '.join(close)}" if close else ""
            raise ValueError(f"no metric is called {name!r}{hint}; docs/metrics.md lists them all")
        return name

    @field_validator("save_request_file")
    @classmethod
    def _is_free(cls, name: str | None) -> str | None:
        if name is None:
            return None
        parts = PurePath(name).parts
        if not parts or PurePath(name).is_absolute() or ".." in parts:
            raise ValueError(
                f'found {name!r}, allowed: a path inside the run\'s folder, such as "save"'
            )
        own = next((own for own in RUN_FILES if parts[0].startswith(own)), None)
        if own is not None:
            raise ValueError(
                f"{name!r} would be taken away like a request, but the run itself keeps {own!r} "
                'in its folder: choose another name, such as "save"'
            )
        return name

    def best_metric_problem(self, eval_sets: Collection[str]) -> str | None:
        """What is wrong if `best_metric` reads an eval set that is not among these names."""
        area, _, rest = (self.best_metric or "").partition("/")
        eval_set = rest.partition("/")[0]
        if area != "eval" or eval_set in eval_sets:
            return None
        if not eval_sets:
            return f"checkpoint.best_metric is {self.best_metric!r}, but the run has no eval sets"
        close = get_close_matches(eval_set, eval_sets, n=1, cutoff=0.0)
        return (
            f"checkpoint.best_metric is {self.best_metric!r}, but no eval set is called "
            f"{eval_set!r}; nearest: {close[0]!r}"
        )
