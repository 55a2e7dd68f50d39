"""Every error that Paceline raises for a user to read.

    PacelineError
    ├── ConfigError            a run file, an override or an argument is wrong    (ValueError)
    ├── DataError              a prompt set is wrong: file, line and reason       (ValueError)
    ├── RewardError            a reward failed and the run is told to fail        (RuntimeError)
    ├── RolloutError           episodes could not be collected                    (RuntimeError)
    ├── EngineError            an engine can not serve                            (RuntimeError)
    ├── TrainerError           a trainer can not go on                            (RuntimeError)
    ├── WeightError            a publish did not reach every engine intact        (RuntimeError)
    ├── CheckpointError        a checkpoint is missing, damaged or can not be written
    │   └── ResumeMismatchError    it belongs to another model, data set or algorithm
    ├── GateError              the policies of a run did not come to rest         (RuntimeError)
    ├── SupervisionError       a policy's task ended too early, or would not end  (RuntimeError)
    ├── DeadlineError          a wait ended at its deadline                       (TimeoutError)
    └── MissingExtraError      an optional dependency is not installed            (ImportError)

A message says what was found, where, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PacelineError(Exception):
    """Base of all errors that are meant for the user."""


class ConfigError(PacelineError, ValueError):
    """A run file, an override or an argument is wrong."""


class DataError(PacelineError, ValueError):
    """A prompt set can not be read or used as configured."""


class RewardError(PacelineError, RuntimeError):
    """A reward failed and `reward.on_failure` is `fail`."""


class RolloutError(PacelineError, RuntimeError):
    """Episodes could not be collected."""


class EngineError(PacelineError, RuntimeError):
    """An engine can not serve the request."""


class TrainerError(PacelineError, RuntimeError):
    """A trainer can not go on."""


class WeightError(PacelineError, RuntimeError):
    """Weights did not reach every engine intact."""


class WorkerError(PacelineError, RuntimeError):
    """A worker process failed, or could not be started."""


class CheckpointError(PacelineError, RuntimeError):
    """A checkpoint is missing, damaged or can not be written."""


class ResumeMismatchError(CheckpointError):
    """A checkpoint belongs to another model, data set or algorithm."""


class GateError(PacelineError, RuntimeError):
    """The policies of a run did not come to rest together, or the gate between them was misused."""


class SupervisionError(PacelineError, RuntimeError):
    """The task of a policy ended before the run did, or did not end with it."""


class DeadlineError(PacelineError, TimeoutError):
    """A wait ended at its deadline."""


class MissingExtraError(PacelineError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the package {package!r}, which is not installed: "
            f"run `pip install 'paceline[{extra}]'`"
        )


def nearest_hint(name: str, known: Iterable[str], *, few: int = 12) -> str:
    """The end of a message about an unknown name: the known one that looks like it.

    Without such a one, the first `few` of all known names. Example: "; did you mean 'answer'?"
    """
    names = sorted(set(known))
    if near := difflib.get_close_matches(name, names, n=1):
        return f"; did you mean {near[0]!r}?"
    if not names or not few:
        return ""
    return "; there is " + ", ".join(map(repr, names[:few])) + (", ..." if names[few:] else "")
