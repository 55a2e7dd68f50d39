"""Server processes: what starts them, and how they are waited for.

Launcher.start(ServerCommand) -> Server      LocalLauncher: a child process of this one
wait_until_healthy(server, check)            progress in the log, the server's own error raised
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from paceline.engines.http import LostServerError
from paceline.errors import EngineError
from paceline.network import free_port

logger = logging.getLogger(__name__)

HOST, PORT, SECOND_PORT = "{host}", "{port}", "{second_port}"
"""Stand in a command for what its launcher chooses on the machine where the server runs. The second
port is one of loopback."""
KEEPER = Path(__file__).with_name("keeper.py")
LAST_LINES, LAST_BYTES = 12, 20_000
END_S = 12.0
"""Seconds in which a keeper must have ended its server."""
LOOK_S, PROGRESS_S = 0.25, 15.0
CHECK_S = 10.0
"""Seconds that one look at a server's health may take."""
FAILURE = re.compile(
    r"^(?:\[[^\]]*\] *)?(?:[\w.]*(?:Error|Exception|Exit|Interrupt)\b|[\w. ]*: error: ).*"
)
"""The line that ends a traceback, or a complaint about the command line."""
NO_PROGRAM = re.compile(r"can not be started: |No module named '?(?:sglang|vllm)\b")
ADVICE = (
    "\nSet engine.python to the interpreter of the environment that the server is installed in."
)


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A server to be started. Travels between machines by pickle."""

    name: str
    """For messages and the log file: `policy-sglang-0`."""
    argv: tuple[str, ...]
    """Program and arguments; `HOST`, `PORT` and `SECOND_PORT` in them are replaced."""
    replica: int = 0
    """Number of the server among those of its engine, from 0: where it stands is the launcher's
    choice, and the same again when it is started anew."""
    num_devices: int = 0
    """GPUs that it needs; it sees no others. 0: it runs on the CPU."""
    env: Mapping[str, str] = field(default_factory=dict)
    """On top of the launcher's own environment."""
    host: str = "127.0.0.1"
    """Address to listen on. `0.0.0.0`: any; the url then has the machine's own."""


class Server(Protocol):
    """A process that a launcher started, on whichever machine. It ends with its launcher's."""

    @property
    def url(self) -> str:
        """`http://host:port`, as this process reaches it."""

    async def ended(self) -> str | None:
        """How it ended, in words (`was killed by signal 9`); None while it runs."""

    async def last_output(self) -> str:
        """The last lines of its output."""

    async def aclose(self) -> None:
        """End it and all that it started: asked first, then killed. Idempotent."""


class Launcher(Protocol):
    """Starts servers where an engine's devices are."""

    async def start(self, command: ServerCommand) -> Server:
        """Returns at once; the server is not healthy yet. Raises EngineError if it can not be
        started, such as a program that is not there."""


class LocalLauncher:
    """Starts servers as child processes: each in a session of its own, so that Ctrl-C reaches this
    process alone, with a log file, and ended within seconds however this process ends."""

    def __init__(self, folder: Path, *, devices: Sequence[str] = ()) -> None:
        """folder: for the log files. devices: GPUs as CUDA_VISIBLE_DEVICES names them; replica r of
        n devices each gets those from r * n on. Default: 0, 1, 2, ..."""
        self._folder, self._devices = folder, tuple(devices)

    async def start(self, command: ServerCommand) -> LocalServer:
        env = {**os.environ, **command.env}
        if command.num_devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self._devices_of(command))
        host, port = command.host, free_port(command.host)
        chosen = {HOST: host, PORT: str(port)}
        if SECOND_PORT in command.argv:
            chosen[SECOND_PORT] = str(free_port("127.0.0.1"))
        argv = [_filled_in(part, chosen) for part in command.argv]
        self._folder.mkdir(parents=True, exist_ok=True)
        log = self._folder / f"{command.name}.log"
        return LocalServer(argv, env, url=f"http://{_reachable(host)}:{port}", log=log)

    def _devices_of(self, command: ServerCommand) -> Sequence[str]:
        first = command.replica * command.num_devices
        last = first + command.num_devices
        if not self._devices:
            return [str(number) for number in range(first, last)]
        if last > len(self._devices):
            raise EngineError(
                f"{command.name} needs GPUs {first} to {last - 1} of this machine's, and there are "
                f"{len(self._devices)}: set engine.replicas or engine.tensor_parallel lower"
            )
        return self._devices[first:last]


class LocalServer:
    """A child process, behind a keeper."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], *, url: str, log: Path) -> None:
        self.url, self.log = url, log
        with log.open("ab") as output:
            self._log_start = output.tell()
            kept, self._held = os.pipe()
            try:
                self._keeper = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(KEEPER), str(kept), *argv],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(env),
                    pass_fds=[kept],
                    start_new_session=True,
                )
            except BaseException:
                os.close(self._held)
                raise
            finally:
                os.close(kept)
        self._is_released = False

    @property
    def pid(self) -> int:
        """Of its keeper."""
        return self._keeper.pid

    async def ended(self) -> str | None:
        code = self._keeper.poll()
        if code is None:
            return None
        signal = code - 128 if code > 128 else -code
        return f"was ended by signal {signal}" if code > 128 or code < 0 else f"ended with {code}"

    async def last_output(self) -> str:
        with self.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - LAST_BYTES))
            return file.read().decode("utf-8", "replace")

    async def aclose(self) -> None:
        if not self._is_released:
            self._is_released = True
            os.close(self._held)
        try:
            await asyncio.to_thread(self._keeper.wait, timeout=END_S)
        except subprocess.TimeoutExpired:
            logger.error("the keeper of %s (process %d) did not end", self.url, self.pid)


async def wait_until_healthy(
    server: Server,
    check: Callable[[], Awaitable[object]],
    *,
    name: str,
    timeout_s: float,
    where: str = "",
) -> None:
    """Returns when `check` does. It may raise LostServerError as long as the server is starting.

    where: of the log, for messages. Raises EngineError with the server's own last words if it ends
    before, or needs too long.
    """
    start = time.monotonic()
    told = start
    seen = ""
    while True:
        if (end := await server.ended()) is not None:
            output = await server.last_output()
            advice = ADVICE if NO_PROGRAM.search(output) else ""
            raise EngineError(
                f"{name} {end} before it was ready: {last_words(output)}{where}{advice}"
            )
        try:
            async with asyncio.timeout(CHECK_S):
                await check()
            return
        except LostServerError as error:
            seen = f": {error}"
        except TimeoutError:
            seen = f": a look at it took longer than {CHECK_S:g} s"
        now = time.monotonic()
        if now - start > timeout_s:
            output = await server.last_output()
            said = f"; its last output: {last_words(output)}" if output.strip() else ""
            raise EngineError(
                f"{name} was not ready within {timeout_s:g} s (engine.start_timeout_s)"
                f"{seen}{said}{where}"
            )
        if now - told > PROGRESS_S:
            told = now
            line = (await server.last_output()).strip().rpartition("\n")[2][-200:]
            logger.info("%s has been starting for %.0f s: %s", name, now - start, line)
        await asyncio.sleep(LOOK_S)


def last_words(output: str) -> str:
    """What says best why a server ended: the last error in its output, and the lines at the end."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    failures = [line for line in lines if FAILURE.match(line)]
    told = "\n".join(lines[-LAST_LINES:])
    if failures:
        return f"{failures[-1][:1000]}\nIts last lines:\n{told}"
    return f"its last lines:\n{told}" if told else "it wrote nothing"


def _filled_in(part: str, chosen: Mapping[str, str]) -> str:
    for name, value in chosen.items():
        part = part.replace(name, value)
    return part


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
