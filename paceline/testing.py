"""Fakes of the seams: no model, no time, every call recorded.

They are for tests of drivers and of code built on Paceline. `FakeEngine`, `FakeTrainer` and
`FakeTeacher` may share a `MemoryLedger`, which knows who holds what and remembers the peaks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paceline.engines.base import Completion, Part, Request
from paceline.errors import EngineError
from paceline.observe.metrics import Metrics
from paceline.trainers.base import AREAS, Head, Later, Place
from paceline.types import Batch, JsonValue, Row, StepReport
from paceline.weights.base import PauseMode, WeightPlan

if TYPE_CHECKING:
    from paceline.types import FloatArray


@dataclass
class MemoryLedger:
    """Bytes held on the device and on the host, by owner, with their peaks."""

    device: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    device_peak: int = 0
    host_peak: int = 0

    def hold(self, owner: str, *, device: int = 0, host: int = 0) -> None:
        """Set what `owner` holds."""
        self.device[owner], self.host[owner] = device, host
        self.device_peak = max(self.device_peak, sum(self.device.values()))
        self.host_peak = max(self.host_peak, sum(self.host.values()))


def echo_seed(request: Request) -> Completion:
    """Answers with two tokens that depend on the seed alone."""
    tokens = [request.seed % 7 + 2, 1]
    return Completion(tokens, [-0.5, -0.25], [0, 0], "stop", stop=1)


class FakeEngine:
    """Answers by a function of the request; refuses to while asleep or paused."""

    def __init__(
        self,
        answer: Callable[[Request], Completion] = echo_seed,
        *,
        ledger: MemoryLedger | None = None,
        sizes: dict[Part, int] | None = None,
    ) -> None:
        self.calls: list[str] = []
        self.version = 0
        self.fail_receive: Exception | None = None
        self._answer = answer
        self._ledger = ledger
        self._sizes: dict[Part, int] = sizes or {"weights": 10, "kv_cache": 50, "graphs": 1}
        self._asleep: set[Part] = set()
        self._needs_weights = False
        self._paused = False
        for part in self._sizes:
            self._account(part)

    def _account(self, part: Part) -> None:
        if self._ledger is not None:
            size, asleep = self._sizes[part], part in self._asleep
            # Sleeping weights are kept on the host; caches are dropped.
            on_host = size if asleep and part == "weights" else 0
            self._ledger.hold(f"engine.{part}", device=0 if asleep else size, host=on_host)

    async def generate(self, request: Request) -> Completion:
        if self._asleep or self._needs_weights or self._paused:
            raise EngineError(
                f"can not generate: asleep {sorted(self._asleep)}, "
                f"weights due {self._needs_weights}, paused {self._paused}"
            )
        self.calls.append("generate")
        completion = self._answer(request)
        completion.versions = [self.version] * len(completion.tokens)
        return completion

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        self.calls.append("score")
        return [0.0] + [-1.0] * (len(tokens) - 1)

    async def receive(self, plan: WeightPlan) -> None:
        self.calls.append(f"receive {plan.version}")
        if self.fail_receive is not None:
            raise self.fail_receive
        if "weights" in self._asleep:
            raise EngineError("can not receive weights while they are asleep")
        self.version, self._needs_weights = plan.version, False

    async def pause(self, mode: PauseMode) -> None:
        self.calls.append(f"pause {mode}")
        self._paused = True

    async def resume(self) -> None:
        self.calls.append("resume")
        self._paused = False

    async def sleep(self, parts: frozenset[Part]) -> None:
        self.calls.append(f"sleep {'+'.join(sorted(parts))}")
        for part in parts:
            self._asleep.add(part)
            self._account(part)

    async def wake(self, parts: frozenset[Part]) -> None:
        self.calls.append(f"wake {'+'.join(sorted(parts))}")
        for part in parts & self._asleep:
            self._asleep.discard(part)
            self._needs_weights |= part == "weights"
            self._account(part)

    async def aclose(self) -> None:
        self.calls.append("close")


class FakeTrainer:
    """One number for a model: each optimizer step adds the number of trained tokens to it.

    It may stand for a policy's trainer or its critic's, whose value of every state is that number.
    """

    def __init__(
        self,
        *,
        ledger: MemoryLedger | None = None,
        size: int = 40,
        head: Head = "policy",
        name: str = "trainer",
    ) -> None:
        """name: its owner's in the ledger."""
        self.calls: list[str] = []
        self.weight = 0
        self.fail_step: int | None = None
        self._version = 0
        self._pending = 0
        self._ledger, self._size = ledger, size
        self._head, self._name = head, name
        self._account("device" if ledger is None else "host")

    def _account(self, where: Place) -> None:
        self._where = where
        if self._ledger is not None:
            on_device = self._size if where == "device" else 0
            self._ledger.hold(self._name, device=on_device, host=self._size - on_device)

    @property
    def version(self) -> int:
        return self._version

    async def forward(self, rows: list[Row], head: Head) -> list[FloatArray]:
        self.calls.append(f"forward {head}")
        if head == "values":
            return [np.where(row.mask_T, float(self.weight), 0.0) for row in rows]
        return [row.behaviour_logprobs_T for row in rows]

    async def forward_backward(self, batch: Batch) -> Metrics:
        self.calls.append("forward_backward")
        if self._where != "device":
            raise RuntimeError(f"the {self._name} is not on the device")
        if self.fail_step == self._version + 1:
            raise RuntimeError(f"step {self.fail_step} fails")
        self._pending += batch.num_trained_tokens
        metrics = Metrics()
        metrics.mean(f"{AREAS[self._head]}/loss", float(batch.num_trained_tokens))
        return metrics

    async def optim_step(self) -> StepReport:
        self.calls.append("optim_step")
        self.weight, self._pending = self.weight + self._pending, 0
        self._version += 1
        return StepReport(self._version, lr=1.0, grad_norm=1.0)

    async def send(self, plan: WeightPlan) -> WeightPlan:
        self.calls.append(f"send {plan.version}")
        return plan

    async def save(self, path: Path, later: Later | None = None) -> None:
        self.calls.append("save")
        text = json.dumps({"version": self._version, "weight": self.weight})

        async def write() -> None:
            path.mkdir(parents=True, exist_ok=True)
            (path / "trainer.json").write_text(text)

        if later is None:
            await write()
        else:
            later(write)

    async def load(self, path: Path) -> None:
        self.calls.append("load")
        state = json.loads((path / "trainer.json").read_text())
        self._version, self.weight = state["version"], state["weight"]

    async def place(self, where: Place) -> None:
        self.calls.append(f"place {where}")
        self._account(where)

    async def aclose(self) -> None:
        self.calls.append("close")


class FakeTeacher:
    """Finds every token as likely as the engine did, less `gap`."""

    def __init__(self, *, ledger: MemoryLedger | None = None, size: int = 45, gap: float = 0.5):
        self.calls: list[str] = []
        self._ledger, self._size, self._gap = ledger, size, gap
        self._account("device" if ledger is None else "host")

    def _account(self, where: Place) -> None:
        self._where = where
        if self._ledger is not None:
            on_device = self._size if where == "device" else 0
            self._ledger.hold("teacher", device=on_device, host=self._size - on_device)

    @property
    def identity(self) -> dict[str, JsonValue]:
        return {"gap": self._gap}

    async def grade(self, rows: list[Row]) -> None:
        self.calls.append(f"grade {len(rows)}")
        if self._where != "device":
            raise RuntimeError("the teacher is not on the device")
        for row in rows:
            row.teacher_logprobs_T = (row.behaviour_logprobs_T - self._gap) * row.mask_T

    async def place(self, where: Place) -> None:
        self.calls.append(f"place {where}")
        self._account(where)

    async def aclose(self) -> None:
        self.calls.append("close")
