"""What an environment returned, made an `Outcome` that the rest of the run can rely on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.rollout.env import Outcome
from paceline.rollout.score import to_number, to_score
from paceline.types import Status

ALL_ROLES = "*"
"""In `Outcome.status`: every role that is not named."""


class _UnusableError(Exception):
    """What it holds can not be used: the word of the cause, and what a person needs to know."""

    def __init__(self, word: str, detail: str) -> None:
        super().__init__(detail)
        self.word = word


def failed_outcome(cause: str, detail: str) -> Outcome:
    """A failed episode. cause: `<origin>/<word>`."""
    return Outcome({}, status={ALL_ROLES: Status.FAILED}, cause=f"{cause}: {detail}")


def to_outcome(result: Any, roles: Sequence[str]) -> Outcome:
    """What an environment returned, as an Outcome of plain numbers.

    A mapping by role gives each role its reward; any other result is scored as a reward
    function's and goes to every role. An Outcome that holds what can not be used is a failed one,
    with a cause that names it. So is a mapping that names some roles and something else.
    """
    if isinstance(result, Outcome):
        try:
            return _checked(result, roles)
        except _UnusableError as exc:
            return failed_outcome(f"env/{exc.word}", str(exc))
    strange = set(result) - set(roles) if isinstance(result, Mapping) else set()
    if strange and len(roles) > 1 and len(strange) < len(result):
        named = ", ".join(map(repr, sorted(map(str, strange))))
        known = ", ".join(map(repr, roles))
        return failed_outcome("env/unknown_role", f"it gives a reward to {named}; there is {known}")
    if isinstance(result, Mapping) and result and not strange:
        scores = {role: to_score(value, {}) for role, value in result.items()}
    else:
        scores = dict.fromkeys(roles, to_score(result, {}))
    failed = [score for score in scores.values() if score.value is None]
    return Outcome(
        rewards={role: score.value for role, score in scores.items()},
        parts={role: score.parts for role, score in scores.items()},
        cause=failed[0].reason if failed else None,
    )


def _checked(outcome: Outcome, roles: Sequence[str]) -> Outcome:
    rewards = _by_role("rewards", outcome.rewards, roles)
    parts = _by_role("parts", outcome.parts, roles)
    status = _by_role("status", outcome.status, (*roles, ALL_ROLES))
    if outcome.cause is not None and not isinstance(outcome.cause, str):
        raise _UnusableError("bad_outcome", f"its cause is {_shown(outcome.cause)}, not a text")
    return Outcome(
        rewards={
            role: None if value is None else _number("bad_reward", f"rewards[{role!r}]", value)
            for role, value in rewards.items()
        },
        parts={
            role: _numbers("bad_part", f"parts[{role!r}]", named) for role, named in parts.items()
        },
        status={role: _status(role, value) for role, value in status.items()},
        cause=outcome.cause,
        metrics=_numbers("bad_metric", "metrics", outcome.metrics),
        is_scored=bool(outcome.is_scored),
    )


def _by_role(what: str, values: Any, roles: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise _UnusableError("bad_outcome", f"its {what} are {_shown(values)}, not a dict by role")
    for role in values:
        if role not in roles:
            known = ", ".join(map(repr, roles))
            raise _UnusableError(
                "unknown_role", f"its {what} name the role {role!r}; there is {known}"
            )
    return values


def _numbers(word: str, where: str, values: Any) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise _UnusableError(word, f"{where} is {_shown(values)}, not a dict of numbers")
    return {str(name): _number(word, f"{where}[{name!r}]", value) for name, value in values.items()}


def _number(word: str, where: str, value: Any) -> float:
    """Also one that is not finite: who uses it says what that means."""
    number, cause = to_number(value)
    if number is not None:
        return number
    if cause in ("nan", "inf"):
        return float("nan" if cause == "nan" else "inf" if value > 0 else "-inf")
    raise _UnusableError(word, f"{where} is {_shown(value)}, not a number")


def _status(role: str, value: Any) -> Status:
    try:
        return Status(value)
    except ValueError:
        known = ", ".join(map(str, Status))
        raise _UnusableError(
            "bad_status", f"status[{role!r}] is {_shown(value)}; there is {known}"
        ) from None


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.80}"
