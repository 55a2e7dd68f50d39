"""A child process that never outlives its parent, with all that it starts itself.

It leads a process group of its own: Ctrl-C in the terminal is the parent's to handle, and one
signal ends the whole group. A guard in that group, one small shell, reads a pipe whose other end
only the parent has: when the parent is gone, however it went, the guard ends the group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import WorkerError

TERM_GRACE_S = 3.0
"""From asking a process to end to killing it."""
KILL_TIMEOUT_S = 10.0
"""For the operating system to bury a killed process."""
TAIL_LINES = 20
TAIL_BYTES = 16_384
GUARD = """
exec 3<&0 0</dev/null
(read -r _ <&3; kill -s KILL -- "-$$") >&2 &
exec "$@" 3<&-
"""


class ChildProcess:
    """One child, its end, and the log that its output goes to."""

    def __init__(
        self,
        transport: asyncio.SubprocessTransport,
        ended: asyncio.Future[None],
        guard: int,
        log: Path,
        log_start: int,
    ) -> None:
        self._transport = transport
        self._guard = guard
        self._is_killed = False
        self.pid = transport.get_pid()
        self.ended = ended
        """Done when the process itself has ended."""
        self._log = log
        self._log_start = log_start
        self.ended.add_done_callback(lambda _: self._kill_group())

    @classmethod
    async def spawn(
        cls, command: Sequence[str], env: Mapping[str, str], log: Path, stdout: socket.socket | None
    ) -> ChildProcess:
        """Start the command; its output is added to `log`, except what goes to `stdout`.

        Raises OSError.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        loop = asyncio.get_running_loop()
        taken, guard = os.pipe()
        with contextlib.ExitStack() as ours:
            ours.callback(os.close, taken)
            on_error = ours.enter_context(contextlib.ExitStack())
            on_error.callback(os.close, guard)
            output = ours.enter_context(log.open("ab"))
            start = output.tell()
            transport, ending = await loop.subprocess_exec(
                lambda: _Ending(loop),
                *("/bin/sh", "-c", GUARD, "sh", *command),
                stdin=taken,
                stdout=output if stdout is None else stdout.fileno(),
                stderr=output,
                env=env,
                start_new_session=True,
            )
            on_error.pop_all()
        return cls(transport, ending.ended, guard, log, start)

    @property
    def is_alive(self) -> bool:
        return not self.ended.done()

    @property
    def how_it_ended(self) -> str:
        """In words: `ended with exit code 1`."""
        code = self._transport.get_returncode()
        return "still runs" if code is None else ending_of(code)

    def signal(self, number: int) -> None:
        """To the process itself. Nothing if it has ended."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def end(self, grace_s: float = TERM_GRACE_S) -> None:
        """Ask it to end, then kill it and its group. Idempotent.

        Raises WorkerError if it can not be buried.
        """
        if self.is_alive and grace_s > 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)
            await asyncio.wait({self.ended}, timeout=grace_s)
        self._kill_group()
        await asyncio.wait({self.ended}, timeout=KILL_TIMEOUT_S)
        if self.is_alive:
            raise WorkerError(f"process {self.pid} did not end in {KILL_TIMEOUT_S:g} s")
        self._transport.close()

    def kill(self) -> None:
        """End the process and its group at once."""
        self._kill_group()

    def last_output(self, num_lines: int = TAIL_LINES) -> str:
        """The last lines that it wrote since it was started."""
        return tail_of(self._log, self._log_start, num_lines)

    def _kill_group(self) -> None:
        # Once only: the number of a group that is gone may be given to another one.
        if not self._is_killed:
            self._is_killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            os.close(self._guard)


class _Ending(asyncio.SubprocessProtocol):
    """asyncio's own `wait` also waits for pipes, which whatever the process started may hold."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ended: asyncio.Future[None] = loop.create_future()

    def process_exited(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def ending_of(code: int) -> str:
    """What a return code says, as asyncio and subprocess give it."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = "; the machine may be out of memory" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def tail_of(log: Path, start: int = 0, num_lines: int = TAIL_LINES) -> str:
    """The last lines of a log file, from byte `start` on."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"(can not read {log}: {error})"
    return "\n".join(text.splitlines()[-num_lines:])
