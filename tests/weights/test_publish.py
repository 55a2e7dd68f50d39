"""A publish is one transaction, on stub engines: order, failures, deadlines, cancellation."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest
import torch
from tiny import tiny_model

from paceline.errors import WeightError
from paceline.weights.base import PauseMode, WeightPlan
from paceline.weights.publish import publish
from paceline.weights.receive import receive_into
from paceline.weights.tensors import checksums, named_tensors

PLAN = WeightPlan("policy", 7, "copy")


@dataclass
class Stub:
    """An engine that serves one version; `fail` names the phase in which it raises or hangs."""

    name: str
    log: list[str]
    fail: str = ""
    hang: str = ""
    version: int = 6
    is_paused: bool = False
    in_flight: list[str] = field(default_factory=lambda: ["running"] * 16)

    async def _at(self, phase: str) -> None:
        self.log.append(f"{phase} {self.name}")
        await asyncio.sleep(0)
        if phase == self.fail:
            raise ConnectionError(f"{self.name} is gone")
        if phase == self.hang:
            await asyncio.Event().wait()

    async def pause(self, mode: PauseMode) -> None:
        await self._at("pause")
        self.is_paused = True
        if mode == "abort":
            self.in_flight = ["aborted"] * len(self.in_flight)

    async def receive(self, plan: WeightPlan) -> None:
        assert self.is_paused
        await self._at("receive")
        self.version = plan.version

    async def resume(self) -> None:
        await self._at("resume")
        self.is_paused = False


@dataclass
class Sender:
    log: list[str]
    fail: bool = False

    async def send(self, plan: WeightPlan) -> WeightPlan:
        self.log.append("send")
        if self.fail:
            raise RuntimeError("no weights")
        return replace(plan, tensors={})


def _engines(log: list[str], **stubs: dict[str, str]) -> dict[str, Stub]:
    return {name: Stub(name, log, **stubs.get(name, {})) for name in ("a", "b", "c")}


def test_order_and_the_version_is_raised_after_all_have_acknowledged_and_before_any_resumes():
    """Case 64."""
    log: list[str] = []
    engines = _engines(log)

    async def verify(engine: Stub, plan: WeightPlan) -> None:
        log.append(f"verify {engine.name}")
        assert engine.version == plan.version

    sent = asyncio.run(
        publish(
            Sender(log),
            engines,
            PLAN,
            pause="keep",
            verify=verify,
            commit=lambda plan: log.append(f"commit {plan.version}"),
        )
    )
    phases = [line.split()[0] for line in log]
    assert phases == (
        ["pause"] * 3 + ["send"] + ["receive"] * 3 + ["verify"] * 3 + ["commit"] + ["resume"] * 3
    )
    assert "commit 7" in log
    assert sent.tensors == {}
    assert not any(engine.is_paused for engine in engines.values())


def test_pause_mode_keep_aborts_nothing():
    """Case 67."""
    engines = _engines([])
    asyncio.run(publish(Sender([]), engines, PLAN, pause="keep"))
    assert sum(e.in_flight.count("aborted") for e in engines.values()) == 0
    asyncio.run(publish(Sender([]), engines, PLAN, pause="abort"))
    assert sum(e.in_flight.count("aborted") for e in engines.values()) == 48


@pytest.mark.parametrize("how", ["fail", "hang"])
def test_an_engine_that_fails_in_transfer_stops_all_from_serving_the_new_version(how):
    """Case 65: the error names it, nothing is committed, none is resumed."""
    log: list[str] = []
    engines = _engines(log, b={how: "receive"})
    with pytest.raises(WeightError) as raised:
        asyncio.run(
            publish(
                Sender(log),
                engines,
                PLAN,
                commit=lambda plan: log.append("commit"),
                deadline_s=0.05,
            )
        )
    reason = "ConnectionError: b is gone" if how == "fail" else "no answer within 0.05 s"
    assert f"receive failed on 1 of 3 engines: 'b': {reason}" in str(raised.value)
    assert "version 7" in str(raised.value)
    assert "stay paused" in raised.value.__notes__[0]
    assert not [line for line in log if line.startswith(("commit", "resume"))]
    assert all(engine.is_paused for engine in engines.values())


def test_a_later_publish_heals_what_a_failed_one_left_paused():
    engines = _engines([], b={"fail": "receive"})
    with pytest.raises(WeightError):
        asyncio.run(publish(Sender([]), engines, PLAN))
    engines["b"].fail = ""
    asyncio.run(publish(Sender([]), engines, replace(PLAN, version=8)))
    assert {(e.version, e.is_paused) for e in engines.values()} == {(8, False)}


def test_failed_verification_counts_as_a_failed_transfer():
    engines = _engines([])

    async def verify(engine: Stub, plan: WeightPlan) -> None:
        if engine.name == "c":
            raise WeightError("checksum of lm_head.weight differs")

    with pytest.raises(WeightError, match=r"verify failed on 1 of 3 engines: 'c': .*lm_head"):
        asyncio.run(publish(Sender([]), engines, PLAN, verify=verify))
    assert all(engine.is_paused for engine in engines.values())


@pytest.mark.parametrize("phase", ["pause", "send"])
def test_a_failure_before_any_transfer_resumes_all_under_the_old_version(phase):
    log: list[str] = []
    engines = _engines(log, a={"fail": phase})
    with pytest.raises(WeightError, match=phase):
        asyncio.run(publish(Sender(log, fail=phase == "send"), engines, PLAN))
    assert [line for line in log if line.startswith("resume")] == [
        "resume a",
        "resume b",
        "resume c",
    ]
    assert {(e.version, e.is_paused) for e in engines.values()} == {(6, False)}


def test_an_engine_that_can_not_resume_is_named_and_the_others_serve():
    engines = _engines([], c={"fail": "resume"})
    committed: list[int] = []
    with pytest.raises(WeightError, match="resume failed on 1 of 3 engines: 'c'"):
        asyncio.run(
            publish(Sender([]), engines, PLAN, commit=lambda plan: committed.append(plan.version))
        )
    assert committed == [7]
    assert [e.is_paused for e in engines.values()] == [False, False, True]


@pytest.mark.parametrize(("phase", "stays_paused"), [("pause", False), ("receive", True)])
def test_a_cancelled_publish_resumes_only_what_still_holds_the_old_weights(phase, stays_paused):
    async def run() -> dict[str, Stub]:
        log: list[str] = []
        engines = _engines(log, b={"hang": phase})
        task = asyncio.create_task(publish(Sender(log), engines, PLAN))
        for _ in range(20):
            await asyncio.sleep(0)
        assert log[-1] == f"{phase} c"
        engines["b"].hang = ""
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return engines

    engines = asyncio.run(run())
    assert [engines["a"].is_paused, engines["c"].is_paused] == [stays_paused] * 2


class _ModelEngine:
    """A receiver with weights of its own that refuses to serve without them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    async def pause(self, mode: PauseMode) -> None: ...

    async def receive(self, plan: WeightPlan) -> None:
        receive_into(self.model, plan)

    async def resume(self) -> None: ...


class _ModelSender:
    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    async def send(self, plan: WeightPlan) -> WeightPlan:
        return replace(plan, tensors=named_tensors(self.model))


def test_after_a_publish_checksums_are_the_trainers_and_after_a_step_they_changed():
    """Case 69, the part of weights."""
    trained, served = tiny_model(seed=1), tiny_model(seed=2)
    engines = {"engine": _ModelEngine(served)}
    first = checksums(named_tensors(served))
    asyncio.run(publish(_ModelSender(trained), engines, PLAN))
    second = checksums(named_tensors(served))
    assert second == checksums(named_tensors(trained))
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(1e-3)
    assert checksums(named_tensors(served)) == second
    asyncio.run(publish(_ModelSender(trained), engines, replace(PLAN, version=8)))
    third = checksums(named_tensors(served))
    assert third == checksums(named_tensors(trained))
    matrices = [name for name in first if not name.endswith("norm.weight")]
    assert all(len({first[name], second[name], third[name]}) == 3 for name in matrices)
