"""A pool of persistent child processes that run users' code under a time limit.

A call that takes too long, or a child that dies, costs that one call: the child is killed with
all that it started, its place in the pool stays, and the next call there starts a new child.
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

from paceline.errors import ConfigError, RewardError
from paceline.rollout.score import Score
from paceline.rollout.worker_protocol import LENGTH, Call, Load, ScorerSpec, frame

START_TIMEOUT_S = 120.0
"""For a new process: start Python and import what the functions need."""
KILL_TIMEOUT_S = 10.0
"""For the operating system to bury a killed process."""
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
            detail = "the process sent no score; does the function write to open files it finds?"
            return Score(None, cause="crashed", detail=detail)
        except (EOFError, OSError):
            if self._is_closed:
                raise RewardError("the reward's worker processes were closed") from None
            child.kill()
            code = await child.exit_code()
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
            code = await self._bury(child)
            match exc:
                case TimeoutError():
                    fault = f"did not finish in {START_TIMEOUT_S:g} s"
                case EOFError() | OSError():
                    fault = f"ended the process with {_ending(code)}"
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


class _Child:
    """One child process and its two pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._requests = process.stdin
        self._replies = process.stdout
        self.pid = process.pid

    @classmethod
    async def spawn(cls) -> _Child:
        paths = [PACKAGE_ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        env.setdefault("OMP_NUM_THREADS", "1")
        command = (sys.executable, "-P", "-m", "paceline.rollout.worker_main", str(os.getpid()))
        # A session of its own: Ctrl-C is the parent's to handle, and killing its process group
        # takes along whatever the user's code has started.
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
        return cls(process)

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, body: bytes) -> dict[str, Any]:
        """Send one request and read its reply. Raises EOFError or OSError if the child is dead.

        The caller sets the time limit.
        """
        self._requests.write(frame(body))
        await self._requests.drain()  # ends: by the caller's limit
        head = await self._replies.readexactly(LENGTH.size)  # ends: by the caller's limit
        # ends: by the caller's limit
        text = await self._replies.readexactly(LENGTH.unpack(head)[0])
        reply: dict[str, Any] = json.loads(text)
        return reply

    def kill(self) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._requests.close()

    async def exit_code(self) -> int:
        """Waits for the end of a killed child. Negative for a signal."""
        async with asyncio.timeout(KILL_TIMEOUT_S):
            return await self._process.wait()


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
