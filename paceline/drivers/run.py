"""What a driver orders: the parts of a run, and when things are due."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.checkpoint import CheckpointStore
from paceline.drivers.board import Board
from paceline.drivers.memory import MemoryPlan
from paceline.drivers.saving import Saves
from paceline.drivers.schedule import SaveRequest, due
from paceline.drivers.supply import Supply
from paceline.evals import EvalDispatcher
from paceline.observe.recorder import Recorder
from paceline.policy import Policy
from paceline.rollout.past import PastSelves
from paceline.types import JsonValue, Sample


@dataclass(frozen=True, slots=True)
class Cadence:
    """When a run saves, evaluates and ends. Steps are counted from 1."""

    num_steps: int
    save_every: int | Literal["never"]
    eval_every: int | None
    eval_first: bool
    """Measure before the first step."""
    counts_epochs: bool = False
    """The run's length is given in epochs, so that each epoch's end saves and evaluates too."""
    debug_exit_after: int | None = None
    """Leave after so many steps of this process, with nothing forced."""
    publish_every: int = 1


@dataclass(slots=True)
class Run:
    """One policy's clock and the parts it turns. Built by `paceline.build`, closed by its disposer.

    With several policies each has one; saves, evals and the end of the run are the leader's.
    """

    policy: Policy
    supply: Supply
    memory: MemoryPlan
    board: Board
    recorder: Recorder
    store: CheckpointStore
    save_request: SaveRequest
    evals: EvalDispatcher[Any]
    cadence: Cadence
    seed: int
    fingerprint: dict[str, JsonValue]
    """What a resumed run must have in common with this one."""
    data_state: Callable[[], JsonValue]
    """What a checkpoint keeps of the data: cursors, and what was sampled and not trained on."""
    saves: Saves = field(default_factory=Saves)
    """Of the leader: the save that may go on in the background."""
    past: list[PastSelves] = field(default_factory=list)
    """Earlier selves of the policy that play roles."""
    others: list[Run] = field(default_factory=list)
    """Of the leader: the clocks of the other policies, which are saved with it."""
    environment: dict[str, JsonValue] = field(default_factory=dict)
    threads: int | None = None
    step: int = 0
    """The last finished step, over all restarts."""
    first_step: int = 1
    """The first step of this process."""
    saved_step: int | None = None
    saved: tuple[dict[str, int], JsonValue] | None = None
    """What every policy had trained at the last save of this process, and the state of the data."""
    evaluated_step: int | None = None
    trained_tokens: int = 0
    """Over all steps of this process."""
    epoch_ended: bool = False
    """An epoch of the data ended in the current step."""
    first_evals: dict[str, float] = field(default_factory=dict)
    last_evals: dict[str, float] = field(default_factory=dict)
    last_samples: list[Sample] = field(default_factory=list)

    def steps(self) -> Iterator[int]:
        """The steps that are still to do; the data may end before `num_steps`."""
        while not self.is_last(self.step):
            yield self.step + 1

    def is_last(self, step: int) -> bool:
        return step >= self.cadence.num_steps or self.supply.is_exhausted

    def is_publish_due(self, step: int) -> bool:
        """Also before every eval, so that a point measures the weights of its step."""
        is_due = step % self.cadence.publish_every == 0
        return is_due or self.is_last(step) or self.is_eval_due(step)

    def is_save_due(self, step: int) -> bool:
        return step > 0 and due(step, self.cadence.save_every, self.epoch_ended, self.is_last(step))

    def is_eval_due(self, step: int) -> bool:
        return step > 0 and due(step, self.cadence.eval_every, self.epoch_ended, self.is_last(step))
