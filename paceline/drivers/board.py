"""The board: what every policy of a run has trained and published, and what it is doing now."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PolicyState:
    """trained: the last step whose updates are all in the trainer. published: the step whose
    weights the engines serve. since: when the phase began, by the board's clock.
    """

    trained: int
    published: int
    phase: str
    since: float


class Board:
    """Written by the task of each policy; read by saves, labels of evals and reports.

    A save must write the steps of `trained_steps`: a step that a policy has only begun is not
    in its weights.
    """

    def __init__(
        self,
        policies: Iterable[str],
        leader: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        now = clock()
        self._states = {name: PolicyState(0, 0, "starting", now) for name in policies}
        self._states[leader]  # a leader that is no policy is a KeyError here
        self.leader = leader

    def __getitem__(self, policy: str) -> PolicyState:
        return self._states[policy]

    def trained_steps(self) -> dict[str, int]:
        """Policy -> last trained step."""
        return {name: state.trained for name, state in self._states.items()}

    def restored(self, policy: str, step: int) -> None:
        """The policy goes on after this step; its engines are going to serve those weights."""
        self._states[policy] = replace(self._states[policy], trained=step, published=step)

    def trained(self, policy: str, step: int) -> None:
        state = self._states[policy]
        if step <= state.trained:
            raise ValueError(f"{policy!r} trained step {step} after step {state.trained}")
        self._states[policy] = replace(state, trained=step)

    def published(self, policy: str, step: int) -> None:
        """The same step may be published again."""
        state = self._states[policy]
        if not state.published <= step <= state.trained:
            raise ValueError(
                f"{policy!r} published step {step}; it has trained step {state.trained} and "
                f"published step {state.published}"
            )
        self._states[policy] = replace(state, published=step)

    def enter(self, policy: str, phase: str) -> None:
        """The policy does something else from now on. phase: as in "is learning"."""
        self._states[policy] = replace(self._states[policy], phase=phase, since=self._clock())

    @contextmanager
    def during(self, policy: str, phase: str) -> Iterator[None]:
        """A phase inside another, which goes on afterwards as if it had not been interrupted."""
        outer = self._states[policy]
        self.enter(policy, phase)
        try:
            yield
        finally:
            self._states[policy] = replace(
                self._states[policy], phase=outer.phase, since=outer.since
            )

    def report(self) -> str:
        """One line a policy, the leader marked."""
        now = self._clock()
        lines = []
        for name, state in self._states.items():
            title = f"{name} (leader)" if name == self.leader else name
            lines.append(
                f"{title}: {state.phase} for {now - state.since:.1f} s; "
                f"trained step {state.trained}, published step {state.published}"
            )
        return "\n".join(lines)
