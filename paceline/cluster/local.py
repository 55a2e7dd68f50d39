"""Worker groups of child processes on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.cluster import wire
from paceline.cluster.base import Rank, WorkerSpec
from paceline.cluster.group import Group
from paceline.cluster.members import Limits, LostWorkerError, read_answer
from paceline.cluster.objects import Kept
from paceline.cluster.process import ChildProcess
from paceline.cluster.worker import CLOSE, Answer, Start
from paceline.deadline import stop
from paceline.errors import WorkerError
from paceline.network import LOOPBACK, free_port

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
ENDING_TIMEOUT_S = 1.0
"""For the rest of an ending: of a dead process, its last answer; of a closed socket, the reason."""
STACKS_TIMEOUT_S = 1.0
SOCKET_BYTES = 4 * 2**20
"""Room between the ends of a socket pair, as far as the system allows it."""


class LocalGroup(Group):
    """A WorkerGroup of child processes. Belongs to the event loop that it was started on."""

    @classmethod
    async def start(
        cls,
        spec: WorkerSpec,
        logs: Path,
        *,
        gpus: Sequence[int] | None = None,
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> LocalGroup:
        """Start the processes, and make the object in each.

        `logs`: folder for what they write. `gpus`: one for each rank, as torch numbers them in this
        process; without them the workers see none. Raises what making the object raises, as `call`
        does; nothing is left behind then.
        """
        port = free_port()
        ranks = [
            Rank(i, spec.size, LOOPBACK, port, "cpu" if gpus is None else "cuda:0", LOOPBACK)
            for i in range(spec.size)
        ]
        members = [
            LocalMember(spec, rank, logs, _environment(spec, env, gpus, rank.index))
            for rank in ranks
        ]
        group = cls(spec.name, members, _packed, limits or Limits())
        try:
            for member in members:
                await member.spawn()
            await group.begin([Start(rank, spec.make, spec.arguments) for rank in ranks])
        except BaseException:
            await group.aclose()
            raise
        return group


class LocalMember:
    """One worker process and the socket to it."""

    def __init__(self, spec: WorkerSpec, rank: Rank, logs: Path, env: Mapping[str, str]) -> None:
        self._env = env
        self._log = logs / log_name(spec, rank.index)
        self._number = 0
        self._process: ChildProcess | None = None
        self._pipe: socket.socket | None = None

    async def spawn(self) -> None:
        """Start the process. Raises WorkerError if the system refuses."""
        command = (sys.executable, "-P", "-m", "paceline.cluster.worker_main", str(os.getpid()))
        ours, theirs = socket.socketpair()
        self._pipe = ours
        ours.setblocking(False)
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
            try:
                self._process = await ChildProcess.spawn(command, self._env, self._log, theirs)
            except OSError as error:
                raise WorkerError(f"a worker process can not be started: {error}") from error
        await wire.send(ours, 0, wire.Packed(wire.encode(tuple(sys.path))))

    async def ask(self, payload: wire.Packed) -> Answer:
        """Send a message and wait for its answer; see `Member.ask`."""
        assert self._process is not None
        exchange = asyncio.ensure_future(self._exchange(payload))
        ended = self._process.ended
        either: set[asyncio.Future[Any]] = {exchange, ended}
        try:
            # ends: by the limit of the group's call
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({exchange}, timeout=ENDING_TIMEOUT_S)
            if not exchange.done():
                raise EOFError
            return exchange.result()
        except (EOFError, OSError):
            await asyncio.wait({ended}, timeout=ENDING_TIMEOUT_S)
            how = self._process.how_it_ended if ended.done() else "closed its connection"
            raise LostWorkerError(how) from None
        finally:
            await stop(exchange)

    async def close(self) -> None:
        """See `Member.close`."""
        if self._process is None or not self._process.is_alive:
            return
        with contextlib.suppress(LostWorkerError):
            answer = await self.ask(wire.Packed(wire.encode((CLOSE, ()))))
            if answer.failure is not None:
                raise WorkerError(f"closing failed: {answer.failure.trace}")
            # ends: by the limit of the group's close
            await asyncio.wait({self._process.ended}, timeout=None)

    async def end(self) -> None:
        """See `Member.end`."""
        if self._process is not None:
            await self._process.end()
        if self._pipe is not None:
            self._pipe.close()

    async def show_stacks(self) -> None:
        """See `Member.show_stacks`."""
        if self._process is not None and hasattr(signal, "SIGUSR1"):
            self._process.signal(signal.SIGUSR1)
            await asyncio.wait({self._process.ended}, timeout=STACKS_TIMEOUT_S)

    async def last_output(self) -> str:
        """See `Member.last_output`."""
        return self._process.last_output() if self._process is not None else ""

    async def _exchange(self, payload: wire.Packed) -> Answer:
        assert self._pipe is not None
        self._number += 1
        await wire.send(self._pipe, self._number, payload)
        number, message = await wire.receive(self._pipe)
        if number != self._number:
            raise EOFError(f"message {self._number} got the answer of message {number}")
        return await read_answer(message)


def _packed(message: wire.Message, _: Sequence[Kept]) -> wire.Packed:
    return wire.Packed(message)


def _environment(
    spec: WorkerSpec, env: Mapping[str, str] | None, gpus: Sequence[int] | None, rank: int
) -> dict[str, str]:
    paths = [PACKAGE_ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    if spec.threads is not None:
        own |= {"OMP_NUM_THREADS": str(spec.threads), "MKL_NUM_THREADS": str(spec.threads)}
    own["CUDA_VISIBLE_DEVICES"] = "" if gpus is None else visible_gpu(gpus[rank])
    return os.environ | own | dict(env or {}) | dict(spec.env)


def visible_gpu(index: int) -> str:
    """The name, for a child process, of the GPU that this process numbers `index`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else []
    return names[index].strip() if index < len(names) else str(index)


def log_name(spec: WorkerSpec, rank: int) -> str:
    """File name for what a rank writes."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", spec.name).strip("-")
    return f"{slug or 'worker'}-{rank}.log"
