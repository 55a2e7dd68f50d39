"""Objects for worker processes of tests; found there by the name of this module."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from paceline.cluster.base import Rank
from paceline.errors import ConfigError, MissingExtraError, ResumeMismatchError

FOREVER_S = 600.0
"""A time that no test reaches."""


class OwnError(ConfigError):
    """A subclass that the package does not have."""


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("not for travel")


class BreaksOnArrival:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise LookupError("no such thing here")


def open_files() -> list[str]:
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
    return found


class Probe:
    """Does what a test asks for."""

    def __init__(self, rank: Rank, *, scale: int = 1, folder: str | None = None) -> None:
        print(f"rank {rank.index} is here", flush=True)
        self.rank = rank
        self.scale = scale
        self.folder = folder
        self.num_calls = 0

    def whoami(self) -> tuple[Rank, int]:
        return self.rank, os.getpid()

    def echo(self, value: Any) -> Any:
        self.num_calls += 1
        return value

    def scaled(self, value: int) -> int:
        return value * self.scale

    def calls(self) -> int:
        return self.num_calls

    def environment(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    async def later(self, value: Any) -> Any:
        return value

    def zeros(self, size: int) -> Any:
        return np.zeros(size, dtype=np.uint8)

    def add_one(self, values: Any) -> Any:
        values += 1
        return values

    def add_one_to(self, kept: Any) -> Any:
        kept["values"] += 1
        return kept["values"]

    def unpicklable(self) -> Any:
        return Unpicklable()

    def breaks_on_arrival(self) -> Any:
        return BreaksOnArrival()

    def fail(self, kind: str, on: int) -> str:
        if self.rank.index != on:
            return "fine"
        match kind:
            case "own":
                raise OwnError("a key is wrong")
            case "extra":
                raise MissingExtraError("this", "thing", "things")
            case "resume":
                raise ResumeMismatchError("another model")
            case "exit":
                raise SystemExit(3)
        raise ZeroDivisionError("by zero")

    def die(self, on: int, how: str = "kill", _: Any = None) -> str:
        if self.rank.index != on:
            return "fine"
        print("about to go", flush=True)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)

    def die_others_wait(self, on: int) -> None:
        if self.rank.index == on:
            os._exit(7)
        time.sleep(FOREVER_S)

    def fail_others_wait(self, on: int) -> None:
        if self.rank.index == on:
            raise ConfigError("the cause")
        time.sleep(FOREVER_S)

    def hang(self, on: int, _: Any = None) -> str:
        if self.rank.index == on:
            self.sleep_on_purpose()
        return "fine"

    def sleep_on_purpose(self) -> None:
        time.sleep(FOREVER_S)

    def wait_for(self, path: str, _: Any = None) -> str:
        """Come to an end when the file is there."""
        Path(f"{path}.waiting-{self.rank.index}").touch()
        while not Path(path).exists():
            time.sleep(0.01)
        return "seen"

    def start_child(self) -> int:
        """A process that outlives this one unless its group is ended."""
        command = [sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"]
        return subprocess.Popen(command).pid

    def write_everywhere(self) -> str:
        """To whatever a program may take for its output."""
        print("printed")
        sys.stdout.write("written")
        os.write(1, b"raw")
        return sys.stdin.read()

    def open_files(self) -> list[str]:
        """What the open files of this process are."""
        return open_files()

    def close(self) -> None:
        if self.folder is not None:
            (Path(self.folder) / f"closed-{self.rank.index}").touch()


class NodeProbe(Probe):
    """Of a worker in a Ray cluster."""

    def node(self) -> str:
        ray = importlib.import_module("ray")
        name: str = ray.get_runtime_context().get_node_id()
        return name


def refuse(rank: Rank) -> Probe:
    print("no good", file=sys.stderr, flush=True)
    if rank.index == rank.size - 1:
        raise ConfigError("this can not be made")
    return Probe(rank)


def die_at_start(rank: Rank) -> Probe:
    print("out of luck", flush=True)
    os._exit(9)


def hang_at_start(rank: Rank) -> Probe:
    time.sleep(FOREVER_S)
    return Probe(rank)
