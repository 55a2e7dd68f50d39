"""Worker groups of Ray actors, one a rank."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cluster import wire
from paceline.cluster.base import Rank, WorkerSpec
from paceline.cluster.group import Group
from paceline.cluster.local import PACKAGE_ROOT, log_name
from paceline.cluster.members import Limits, LostWorkerError, read_answer
from paceline.cluster.objects import Kept
from paceline.cluster.placement import Device
from paceline.cluster.ray_actors import RankActor, for_ray, from_ray
from paceline.cluster.worker import CLOSE, Answer, Start
from paceline.errors import MissingExtraError, WorkerError

INLINE_BYTES = 100_000
"""Smaller messages travel with the call; larger ones once, through the object store."""
KILL_TIMEOUT_S = 10.0
NODE_TIMEOUT_S = 20.0
"""For an actor of a node, which never does anything long, to answer."""
STACKS_WAIT_S = 0.5
FORWARDED = re.compile(
    r"(HF|TRANSFORMERS|TOKENIZERS|NCCL|GLOO|TORCH|PYTORCH|SGLANG|VLLM|PACELINE|MKL|OMP)_"
)
"""Environment variables of the driver that every worker gets, on whichever node."""


def load_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingExtraError('cluster.runtime = "ray"', "ray", "ray") from error


async def result_of(reference: Any) -> Any:
    """The value of an object reference. Has no limit of its own; cancelling leaves the task be.

    Raises what Ray raises.
    """
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def copy(done: Any) -> None:
        if not waiter.done():
            error = done.exception()
            waiter.set_exception(error) if error else waiter.set_result(done.result())

    def tell(done: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(copy, done)

    reference.future().add_done_callback(tell)
    return await waiter  # ends: by the limit of the caller


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """What an actor gets beside what its node has."""
    forwarded = {k: v for k, v in os.environ.items() if FORWARDED.match(k)}
    paths = [PACKAGE_ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    return forwarded | own | dict(env)


def options_on(node: str, env: Mapping[str, str]) -> dict[str, Any]:
    """Of an actor on that node; it takes no resources, which the actor of the node has taken."""
    load_ray()
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    return {
        "num_cpus": 0,
        "max_restarts": 0,
        "runtime_env": {"env_vars": environment(env)},
        "scheduling_strategy": strategies.NodeAffinitySchedulingStrategy(node, soft=False),
    }


@dataclass(frozen=True, slots=True)
class NodeHandle:
    """A node that the run uses, and the actor that looks after it."""

    name: str
    address: str
    actor: Any
    gpus: tuple[str, ...] = ()
    """Names of the GPUs that the run has there, for CUDA_VISIBLE_DEVICES."""

    def gpu(self, device: Device) -> str | None:
        return None if device.gpu is None else self.gpus[device.gpu]


class RayPayload:
    """A message for actors. Ray frees a large one when this is closed and the last has read it."""

    def __init__(self, message: wire.Message, kept: Sequence[Kept] = ()) -> None:
        first: Any = for_ray(message)
        if wire.size_of(message) >= INLINE_BYTES:
            first = load_ray().put(first)
        self.arguments = (first, *(value.reference for value in kept))

    def close(self) -> None:
        """See `Payload.close`."""
        self.arguments = ()


def keep_in_ray(value: Any) -> Kept:
    """In the object store, until it is let go of."""
    return Kept(None, reference=load_ray().put(for_ray(wire.encode(value))))


class RayGroup(Group):
    """A WorkerGroup of actors. Belongs to the event loop that it was started on."""

    @classmethod
    async def start(
        cls,
        spec: WorkerSpec,
        logs: Path,
        *,
        devices: Sequence[Device],
        nodes: Mapping[str, NodeHandle],
        env: Mapping[str, str],
        limits: Limits,
    ) -> RayGroup:
        """Start an actor on each device, and make the object in each.

        Raises what making the object raises, as `call` does; nothing is left behind then.
        """
        members = [
            RayMember(spec, index, device, nodes[device.node], logs, env)
            for index, device in enumerate(devices)
        ]
        group = cls(spec.name, members, RayPayload, limits)
        try:
            try:
                async with asyncio.timeout(limits.start_s):
                    ports = [await member.find() for member in members]
            except TimeoutError:
                raise WorkerError(
                    f"{spec.name}: Ray did not start {spec.size} actors in {limits.start_s:g} s"
                ) from None
            first = members[0].node.address
            starts = []
            for index, device in enumerate(devices):
                name = "cpu" if device.gpu is None else "cuda:0"
                host = nodes[device.node].address
                rank = Rank(index, spec.size, first, ports[0], name, host)
                starts.append(Start(rank, spec.make, spec.arguments))
            await group.begin(starts)
        except BaseException:
            await group.aclose()
            raise
        return group


class RayMember:
    """One actor."""

    def __init__(
        self,
        spec: WorkerSpec,
        index: int,
        device: Device,
        node: NodeHandle,
        logs: Path,
        env: Mapping[str, str],
    ) -> None:
        own = dict(env) | {"CUDA_VISIBLE_DEVICES": node.gpu(device) or ""}
        if spec.threads is not None:
            own |= {"OMP_NUM_THREADS": str(spec.threads), "MKL_NUM_THREADS": str(spec.threads)}
        self.node = node
        self._log = str(logs / log_name(spec, index))
        self._pid: int | None = None
        self._is_ended = False
        ray = load_ray()
        self._actor = (
            ray.remote(RankActor)
            .options(**options_on(node.name, own | dict(spec.env)))
            .remote(self._log, tuple(sys.path))
        )

    async def find(self) -> int:
        """Wait until the process is there; returns a port that is free there."""
        address = self.node.address
        self._pid, self._log, port = await self._call(self._actor.whereabouts.remote(address))
        return int(port)

    async def ask(self, payload: RayPayload) -> Answer:
        """See `Member.ask`."""
        return await read_answer(
            from_ray(await self._call(self._actor.ask.remote(*payload.arguments)))
        )

    async def close(self) -> None:
        """See `Member.close`."""
        if self._is_ended or self._pid is None:
            return
        with contextlib.suppress(LostWorkerError):
            answer = await self.ask(RayPayload(wire.encode((CLOSE, ()))))
            if answer.failure is not None:
                raise WorkerError(f"closing failed: {answer.failure.trace}")

    async def end(self) -> None:
        """See `Member.end`."""
        if self._is_ended:
            return
        self._is_ended = True
        load_ray().kill(self._actor, no_restart=True)
        if self._pid is None:
            return
        asked = self.node.actor.end.remote(self._pid, KILL_TIMEOUT_S)
        if await self._of_node(asked, True) is False:
            raise WorkerError(f"process {self._pid} did not end in {KILL_TIMEOUT_S:g} s")

    async def show_stacks(self) -> None:
        """See `Member.show_stacks`."""
        if self._pid is not None:
            await self._of_node(self.node.actor.signal.remote(self._pid, signal.SIGUSR1), None)
            await asyncio.sleep(STACKS_WAIT_S)

    async def last_output(self) -> str:
        """See `Member.last_output`."""
        text: str = await self._of_node(self.node.actor.last_output.remote(self._log), "")
        return text

    async def _of_node(self, reference: Any, default: Any) -> Any:
        """What the node says; the default if it is gone itself."""
        try:
            async with asyncio.timeout(NODE_TIMEOUT_S + KILL_TIMEOUT_S):
                return await result_of(reference)
        except (load_ray().exceptions.RayError, TimeoutError):
            return default

    async def _call(self, reference: Any) -> Any:
        try:
            return await result_of(reference)
        except load_ray().exceptions.RayError as error:
            raise LostWorkerError(_how_of(str(error))) from None


def _how_of(text: str) -> str:
    """From Ray's message, the sentence that says how an actor ended."""
    text = " ".join(text.split())
    if "connection error code 2" in text:
        return "ended unexpectedly: killed, perhaps for want of memory, or crashed"
    found = re.search(r"(?:exit detail:|dead because) (.*?\.)(?: |$)", text)
    return f"ended: {found.group(1) if found else text[:500]}"
