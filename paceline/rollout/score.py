"""What a reward gave, and how results of user functions become one.

Standard library only: the worker processes of `workers` import this.
"""

from __future__ import annotations

import decimal
import math
import numbers
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_DETAIL = 2000
"""Characters of a failure's description."""


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one answer.

    Example: Score(1.2, {"accuracy": 1.0, "format": 0.2}), or, for a function that hung,
    Score(None, cause="timeout", detail="no result after 10 s").
    """

    value: float | None
    """None: could not be scored, for the `cause`."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts, unweighted."""
    cause: str | None = None
    """One word to count by: timeout, crashed, none, nan, inf, bad_result, or an exception's
    name."""
    detail: str = ""
    """What a person needs to find the fault; the first line is a summary."""
    seconds: float = 0.0
    """Time the call took."""

    @property
    def reason(self) -> str | None:
        """`reward/<cause>: <detail>`, as samples carry it."""
        if self.cause is None:
            return None
        return f"reward/{self.cause}: {self.detail}" if self.detail else f"reward/{self.cause}"


def to_score(result: Any, weights: Mapping[str, float], seconds: float = 0.0) -> Score:
    """A number, a mapping of named numbers, or None -> Score. Never raises."""
    if isinstance(result, Mapping):
        return _score_parts(result, weights, seconds)
    if weights:
        return _failed("bad_result", f"{_shown(result)} instead of parts {list(weights)}", seconds)
    value, cause = to_number(result)
    if cause is not None:
        return _failed(cause, _explain(cause, result), seconds)
    return Score(value, seconds=seconds)


def to_number(value: Any) -> tuple[float | None, str | None]:
    """(number, None), or (None, cause). Takes numbers of Python, numpy and 0-d tensors."""
    if value is None:
        return None, "none"
    if not isinstance(value, float | int):
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            value = value.item()
        if not isinstance(value, numbers.Real | decimal.Decimal):
            return None, "bad_result"
    try:
        number = float(value)
    except OverflowError:
        return None, "inf"
    if math.isnan(number):
        return None, "nan"
    return (None, "inf") if math.isinf(number) else (number, None)


def exception_score(exc: BaseException, own_files: frozenset[str], seconds: float) -> Score:
    """A raised exception as a failed score that names the user's line.

    `own_files`: frames of these files are left out at the head of the traceback.
    """
    tb = exc.__traceback__
    while tb is not None and tb.tb_next and tb.tb_frame.f_code.co_filename in own_files:
        tb = tb.tb_next
    where = ""
    if tb is not None and (frames := traceback.extract_tb(tb)):
        last = frames[-1]
        where = f" ({last.filename}:{last.lineno} in {last.name})"
    summary = f"{exc}{where}".strip()
    text = "".join(traceback.format_exception(type(exc), exc, tb)).rstrip()
    return _failed(type(exc).__name__, f"{summary}\n{text}", seconds)


def _score_parts(result: Mapping[Any, Any], weights: Mapping[str, float], seconds: float) -> Score:
    parts: dict[str, float] = {}
    total = 0.0
    if missing := [name for name in weights if name not in result]:
        return _failed("bad_result", f"part {missing[0]!r} is not in {_shown(result)}", seconds)
    if not result:
        return _failed("bad_result", "returned an empty dict of parts", seconds)
    for key, raw in result.items():
        name = str(key)
        value, cause = to_number(raw)
        weight = weights.get(name, 0.0) if weights else 1.0
        if value is not None:
            parts[name] = value
            total += weight * value
        elif weight and cause is not None:
            return _failed(cause, f"part {name!r}: {_explain(cause, raw)}", seconds)
    return Score(total, parts, seconds=seconds)


def _explain(cause: str, result: Any) -> str:
    if cause == "none":
        return "returned None"
    if cause == "bad_result":
        return f"returned {_shown(result)} instead of a number, a dict of numbers, or None"
    return f"returned {cause}"


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as exc:
        text = f"(its repr raised {type(exc).__name__})"
    return f"{type(value).__name__} {text[:80]}"


def _failed(cause: str, detail: str, seconds: float) -> Score:
    return Score(None, cause=cause, detail=detail[:MAX_DETAIL], seconds=seconds)
