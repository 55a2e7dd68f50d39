"""A pool of persistent child processes that run users' code under a time limit.

A call that takes too long, or a child that dies, costs that one call: the child is killed with
all that it started (its process group, even where the child itself is dead already), its place
in the pool stays, and the next call there starts a new child. Replies carry the number of their
call, so that no answer ever gets the score of another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from paceline.deadline import stop
from paceline.errors import ConfigError, DeadlineError, RewardError
from paceline.rollout.score import Score
from paceline.rollout.worker_protocol import HEAD, Call, Load, ScorerSpec, frame

START_TIMEOUT_S = 120.0
"""For a new process: start Python and import what the functions need."""
KILL_TIMEOUT_S = 10.0
"""For the operating system to bury a killed process."""
ENDING_TIMEOUT_S = 1.0
"""For the rest of an ending: of a dead process, its last reply; of closed pipes, the exit code."""
PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


class WorkerPool:
    """Runs named scorers in at most `num_workers` child processes, each one call at a time.

    Children start with the first calls that need them. The pool belongs to the event loop of its
    first call and must be closed there.
    """

    def __init__(
        self, scorers: Mapping[str, ScorerSpec], *, num_workers: int, timeout_s: float
    ) -> None:
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self._load = Load(dict(scorers), tuple(sys.path))
        self._slots = asyncio.Semaphore(num_workers)
        self._idle: list[_Child] = []
        self._children: set[_Child] = set()
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the living children."""
        return sorted(child.pid for child in self._children)

    async def start(self) -> None:
        """Start one child now. Raises ConfigError if a scorer can not be loaded or called."""
        async with self._slots:  # ends: each holder by its own time limits
            self._idle.append(await self._free_child())

    async def call(self, scorer: str, values: Mapping[str, Any]) -> Score:
        """Run one scorer; waits for a free child. Failures are scores with a cause.

        Cancelling the call kills its child.
        """
        async with self._slots:  # ends: each holder by its own time limits
            if self._is_closed:
                raise RewardError("the reward's worker processes are closed")
            child = await self._free_child()
            try:
                score = await self._ask(child, Call(scorer, values))
            except BaseException:
                await self._bury(child)
                raise
            if score.cause in ("timeout", "crashed"):
                await self._bury(child)
            else:
                self._idle.append(child)
            return score

    async def aclose(self) -> None:
        """Kill all children. Idempotent; calls that still run fail."""
        self._is_closed = True
        self._idle.clear()
        for child in list(self._children):
            await self._bury(child)

    async def _ask(self, child: _Child, call: Call) -> Score:
        try:
            body = cloudpickle.dumps(call)
        except Exception as exc:
            return Score(None, cause="unpicklable", detail=f"the prompt can not be sent: {exc}")
        try:
            async with asyncio.timeout(self.timeout_s):
                return Score(**await child.ask(body))
        except TimeoutError:
            detail = f"no result after {self.timeout_s:g} s; the process was replaced"
            return Score(None, cause="timeout", detail=detail, seconds=self.timeout_s)
        except (ValueError, TypeError):
            detail = (
                "the process sent no score of this call; does the function fork, or write to open "
                "files it finds?"
            )
            return Score(None, cause="crashed", detail=detail)
        except (EOFError, OSError):
            if self._is_closed:
                raise RewardError("the reward's worker processes were closed") from None
            await child.settle()
            code = await self._bury(child)
            return Score(None, cause="crashed", detail=f"the process ended with {_ending(code)}")

    async def _free_child(self) -> _Child:
        while self._idle:
            child = self._idle.pop()
            if child.is_alive:
                return child
            await self._bury(child)
        return await self._new_child()

    async def _new_child(self) -> _Child:
        child = await _Child.spawn()
        self._children.add(child)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                error = (await child.ask(pickle.dumps(self._load)))["error"]
        except BaseException as exc:
            if isinstance(exc, EOFError | OSError) and not isinstance(exc, TimeoutError):
                await child.settle()
            code = await self._bury(child)
            match exc:
                case TimeoutError():
                    fault = f"did not finish in {START_TIMEOUT_S:g} s"
                case EOFError() | OSError():
                    fault = f"ended the process with {_ending(code)}"
                case ValueError() | TypeError() | LookupError():
                    fault = "wrote to open files that are not theirs"
                case _:
                    raise
            raise ConfigError(f"importing the reward functions {fault}") from exc
        if error is not None:
            await self._bury(child)
            raise ConfigError(error)
        return child

    async def _bury(self, child: _Child) -> int:
        child.kill()
        code = await child.exit_code()
        self._children.discard(child)
        return code


class _Ending(asyncio.subprocess.SubprocessStreamProtocol):
    """The pipes of a process, and its end.

    asyncio's own `wait` also waits until the pipes are closed, and whatever the process has
    started may hold them open after it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=2**16, loop=loop)
        self.ended: asyncio.Future[None] = loop.create_future()

    def process_exited(self) -> None:
        super().process_exited()
        if not self.ended.done():
            self.ended.set_result(None)


class _Child:
    """One child process and its two pipes."""

    def __init__(self, transport: asyncio.SubprocessTransport, ending: _Ending) -> None:
        assert ending.stdin is not None
        assert ending.stdout is not None
        self._transport = transport
        self._ended = ending.ended
        self._requests = ending.stdin
        self._replies = ending.stdout
        self._number = 0
        self._is_killed = False
        self.pid = transport.get_pid()
        self._is_given_up = False
        self._ended.add_done_callback(lambda _: self._on_end())

    @classmethod
    async def spawn(cls) -> _Child:
        paths = [PACKAGE_ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        env.setdefault("OMP_NUM_THREADS", "1")
        command = (sys.executable, "-P", "-m", "paceline.rollout.worker_main", str(os.getpid()))
        loop = asyncio.get_running_loop()
        # A session of its own: Ctrl-C is the parent's to handle, and killing its process group
        # takes along whatever the user's code has started.
        transport, ending = await loop.subprocess_exec(
            lambda: _Ending(loop),
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=None,
            env=env,
            start_new_session=True,
        )
        return cls(transport, ending)

    @property
    def is_alive(self) -> bool:
        return not self._ended.done()

    async def ask(self, body: bytes) -> dict[str, Any]:
        """Send one request and read its reply.

        Raises EOFError or OSError if the child is dead, ValueError if what it sent is no reply to
        this request. The caller sets the time limit.
        """
        self._number += 1
        exchange = asyncio.ensure_future(self._exchange(self._number, body))
        either: set[asyncio.Future[Any]] = {exchange, self._ended}
        try:
            # ends: by the caller's limit
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not exchange.done():
                await asyncio.wait({exchange}, timeout=ENDING_TIMEOUT_S)
            if not exchange.done():
                raise EOFError("the process has ended")
            return exchange.result()
        finally:
            await stop(exchange)

    async def _exchange(self, number: int, body: bytes) -> dict[str, Any]:
        self._requests.write(frame(number, body))
        await self._requests.drain()  # ends: by the limit of the caller of `ask`
        # ends: by the limit of the caller of `ask`
        answered, length = HEAD.unpack(await self._replies.readexactly(HEAD.size))
        if answered != number:
            raise ValueError(f"request {number} got the reply of request {answered}")
        # ends: by the limit of the caller of `ask`
        reply: dict[str, Any] = json.loads(await self._replies.readexactly(length))
        return reply

    async def settle(self) -> None:
        """Let a child that closed its pipes end by itself, so that its exit code tells why."""
        await asyncio.wait({self._ended}, timeout=ENDING_TIMEOUT_S)

    def kill(self) -> None:
        """End the child and whatever else is in its process group, and give up its pipes."""
        self._kill_group()
        # Not `close`, which waits until everything is written: nobody reads it any more.
        if not self._requests.transport.is_closing():
            self._requests.transport.abort()
        self._is_given_up = True
        if self._ended.done():
            self._transport.close()

    def _on_end(self) -> None:
        self._kill_group()
        if self._is_given_up:
            # Not sooner: closing polls a process that may have ended, behind asyncio's back.
            self._transport.close()

    def _kill_group(self) -> None:
        # Once only: the number of a group that is gone may be given to another one.
        if not self._is_killed:
            self._is_killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def exit_code(self) -> int:
        """Waits for the end of a killed child. Negative for a signal."""
        await asyncio.wait({self._ended}, timeout=KILL_TIMEOUT_S)
        code = self._transport.get_returncode()
        if code is None:
            raise DeadlineError(f"process {self.pid} did not end in {KILL_TIMEOUT_S:g} s")
        return code


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
