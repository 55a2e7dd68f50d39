"""What runs in the processes of a Ray cluster: one actor a rank, and one a node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.cluster import wire
from paceline.cluster.objects import receiving
from paceline.cluster.process import tail_of
from paceline.cluster.worker import Worker, prepare_process
from paceline.engines.server import LocalLauncher, Server, ServerCommand
from paceline.network import free_port

RAYS_OWN_KILL_S = 2.0
"""For Ray, which takes a process that it did not end itself for a crash and tells the user so."""
GUARD = 'read -r _; kill -s KILL -- "-$1"'


class RankActor:
    """One rank of a worker group, in a process of its own."""

    def __init__(self, log: str, paths: Sequence[str]) -> None:
        self.log = _redirect_output(Path(log))
        self._held = _guard_group()
        prepare_process(paths)
        self._worker = Worker()

    def whereabouts(self, address: str) -> tuple[int, str, int]:
        """Process id, log file, and a port that is free on this node."""
        return os.getpid(), str(self.log), free_port(address)

    def ask(self, message: list[Any], *kept: list[Any]) -> list[Any]:
        """See `Worker.answer`."""
        with receiving([from_ray(value) for value in kept]):
            return for_ray(self._worker.answer(from_ray(message)))


class NodeActor:
    """Looks after what the run has on one node: its GPUs, worker processes and servers."""

    def __init__(self, logs: str, paths: Sequence[str]) -> None:
        prepare_process(paths)
        self._logs = _writable(Path(logs))
        self._servers: list[Server] = []

    async def gpus(self) -> list[str]:
        """Names of the GPUs that Ray gave this actor, for CUDA_VISIBLE_DEVICES."""
        return list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))

    async def last_output(self, log: str) -> str:
        """Of a rank on this node."""
        return tail_of(Path(log))

    async def signal(self, pid: int, number: int) -> None:
        """To the process of a rank on this node."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    async def end(self, pid: int, timeout_s: float) -> bool:
        """Kill the process group of a rank; False if it is still there at the end."""
        return await asyncio.to_thread(_end_group, pid, timeout_s)

    async def start_server(self, command: ServerCommand, devices: Sequence[str]) -> tuple[int, str]:
        """Number of the new server for the calls below, and its url."""
        server = await LocalLauncher(self._logs, devices=devices).start(command)
        self._servers.append(server)
        return len(self._servers) - 1, server.url

    async def server_ended(self, number: int) -> str | None:
        return await self._servers[number].ended()

    async def server_output(self, number: int) -> str:
        return await self._servers[number].last_output()

    async def close_server(self, number: int) -> None:
        await self._servers[number].aclose()


def for_ray(message: wire.Message) -> list[Any]:
    """With arrays in place of buffers: Ray moves these without copying them into its pickle."""
    body, *buffers = message
    return [bytes(body), *(np.frombuffer(buffer, np.uint8) for buffer in buffers)]


def from_ray(message: list[Any]) -> wire.Message:
    """A copy, which can be written to: the object store may let go of its own at once."""
    body, *buffers = message
    return [body, *(bytearray(buffer.data) for buffer in buffers)]


def _redirect_output(log: Path) -> Path:
    """Prints of this process, and of what it starts, go to the log."""
    log = _writable(log.parent) / log.name
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(file, standard)
    os.close(file)
    return log


def _writable(folder: Path) -> Path:
    """The folder; on a node that can not have it, one of its own for temporary files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / "paceline-logs"
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _guard_group() -> int:
    """Lead a process group that ends with this process; returns what must stay open for that."""
    with contextlib.suppress(PermissionError):  # it leads one already
        os.setpgid(0, 0)
    taken, held = os.pipe()
    subprocess.Popen(
        ["/bin/sh", "-c", GUARD, "sh", str(os.getpgrp())],
        stdin=taken,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(taken)
    return held


def _end_group(pid: int, timeout_s: float) -> bool:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.poll(RAYS_OWN_KILL_S * 1000)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(process)
