"""What went wrong in a worker, on its way to the driver, and what becomes of it there."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from paceline import errors
from paceline.errors import PacelineError, WorkerError


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a worker, without anything that may not travel."""

    error: str
    """Name of the class in `paceline.errors`, or of another one, with its module."""
    message: str
    trace: str
    """The traceback as text."""
    notes: tuple[str, ...] = ()
    is_ours: bool = False


def failure_of(error: BaseException) -> Failure:
    notes = tuple(getattr(error, "__notes__", ()))
    trace = "".join(traceback.format_exception(error)).rstrip()
    for kind in type(error).__mro__:
        if kind.__module__ == errors.__name__ and issubclass(kind, PacelineError):
            return Failure(kind.__name__, str(error), trace, notes, is_ours=True)
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return Failure(f"{module}{kind.__qualname__}", str(error), trace, notes)


def error_of(failure: Failure, where: str) -> PacelineError:
    """The error for the driver to raise; `where`: `rank 1 of trainer of solver`."""
    if not failure.is_ours:
        return WorkerError(
            f"{where} failed: {failure.error}: {failure.message}\nIts traceback:\n{failure.trace}"
        )
    kind: type[PacelineError] = getattr(errors, failure.error)
    error = kind.__new__(kind, failure.message)
    for note in (*failure.notes, f"raised in {where}"):
        error.add_note(note)
    return error
