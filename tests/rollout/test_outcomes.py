from __future__ import annotations

from typing import Any

import pytest

from paceline.rollout.env import Outcome
from paceline.rollout.outcomes import to_outcome
from paceline.types import Status


def test_results_by_role_and_for_all_roles() -> None:
    roles = ("white", "black")
    assert to_outcome({"white": 1.0, "black": None}, roles).rewards == {"white": 1.0, "black": None}
    assert to_outcome(0.5, roles).rewards == {"white": 0.5, "black": 0.5}
    assert to_outcome({"style": 0.5}, roles).parts == {r: {"style": 0.5} for r in roles}


@pytest.mark.parametrize(
    ("outcome", "cause"),
    [
        (Outcome({"policy": 1.0}, metrics={"x": "str"}), "env/bad_metric: metrics['x'] is str"),  # type: ignore[dict-item]
        (Outcome({"policy": 1.0}, metrics={"x": None}), "env/bad_metric: metrics['x'] is NoneType"),  # type: ignore[dict-item]
        (Outcome({"policy": 1.0}, metrics=3), "env/bad_metric: metrics is int 3"),  # type: ignore[arg-type]
        (Outcome({"policy": "1"}), "env/bad_reward: rewards['policy'] is str '1'"),  # type: ignore[dict-item]
        (Outcome(1.0), "env/bad_outcome: its rewards are float 1.0"),  # type: ignore[arg-type]
        (Outcome({"other": 1.0}), "env/unknown_role: its rewards name the role 'other'; there"),
        (Outcome({}, parts={"policy": {"a": []}}), "env/bad_part: parts['policy']['a'] is list"),  # type: ignore[dict-item]
        (Outcome({}, status={"policy": "done"}), "env/bad_status: status['policy'] is str 'done'"),  # type: ignore[dict-item]
        (Outcome({}, cause=3), "env/bad_outcome: its cause is int 3"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_an_outcome_that_can_not_be_used_is_a_failed_one(outcome: Outcome, cause: str) -> None:
    made = to_outcome(outcome, ("policy",))
    assert (made.rewards, made.status, made.metrics) == ({}, {"*": Status.FAILED}, {})
    assert (made.cause or "").startswith(cause)


class Scalar:
    """Like a 0-d array."""

    shape: tuple[int, ...] = ()

    def item(self) -> float:
        return 2.5


def test_numbers_of_other_libraries_become_plain_ones() -> None:
    scalar: Any = Scalar()
    made = to_outcome(
        Outcome({"policy": scalar}, {"policy": {"a": scalar}}, metrics={"turns": True}), ("policy",)
    )
    assert (made.rewards, made.parts) == ({"policy": 2.5}, {"policy": {"a": 2.5}})
    assert {name: type(value) for name, value in made.metrics.items()} == {"turns": float}


def test_a_status_may_be_a_text() -> None:
    made = to_outcome(Outcome({}, status={"*": "truncated"}), ("policy",))  # type: ignore[dict-item]
    assert made.status == {"*": Status.TRUNCATED}
