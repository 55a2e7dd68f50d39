"""A process group of one sender and its receivers, apart from torch's default group.

Rank 0 is the sender, and the group's store listens there. Members may be of other programs: the
group is the one that torch's own functions would make under the same name, so SGLang servers join
it by their `/init_weights_update_group`.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from paceline.errors import WeightError

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.weights.base import Meeting

logger = logging.getLogger(__name__)
c10d: Any = torch.distributed
POLL_S = 0.001


class Listener:
    """A port of this machine that is taken before anybody is told of it."""

    def __init__(self, address: str) -> None:
        """address: one of this machine, which the others can reach."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.bind((address, 0))
            self._socket.listen(1024)
        except OSError as error:
            self._socket.close()
            raise WeightError(f"no port of {address} can be listened on: {error}") from error
        self.address = address
        self.port: int = self._socket.getsockname()[1]

    def detach(self) -> int:
        """The file descriptor, which belongs to the caller now."""
        return self._socket.detach()

    def close(self) -> None:
        """Give the port back. Idempotent."""
        self._socket.close()


@dataclass(frozen=True, slots=True)
class Group:
    """As `join` returns it."""

    meeting: Meeting
    rank: int
    device: torch.device
    """Of what it can broadcast."""
    backend: Any
    store: Any


def join(
    meeting: Meeting,
    rank: int,
    timeout_s: float,
    *,
    listener: Listener | None = None,
    device: torch.device | None = None,
    stopped: threading.Event | None = None,
) -> Group:
    """Wait until all members have come.

    listener: of rank 0, if the meeting's port was taken before. device: of this rank, for NCCL.
    stopped: ends the wait from another thread. Raises WeightError if they have not come within
    `timeout_s`.
    """
    found: list[Group] = []
    errors: list[Exception] = []
    done = threading.Event()

    def meet() -> None:
        try:
            found.append(_join(meeting, rank, timeout_s, listener, device))
        except Exception as error:  # handed to the thread that waits
            errors.append(error)
        done.set()

    # torch can not be told to give up, so that it waits in a thread that may be left alone.
    threading.Thread(target=meet, name=f"meeting {meeting.name}", daemon=True).start()
    deadline = time.monotonic() + 2 * timeout_s + 1  # for the store, and for the group
    while not done.wait(timeout=POLL_S):
        if stopped is not None and stopped.is_set():
            errors.append(RuntimeError("it was stopped"))
            break
        if time.monotonic() > deadline:
            errors.append(TimeoutError("torch did not keep to its time limit"))
            break
    if errors:
        raise WeightError(
            f"rank {rank} of {meeting.size} did not meet the others at "
            f"{meeting.address}:{meeting.port} ({meeting.backend}, time limit {timeout_s:g} s): "
            f"{_first_line(errors[0])}"
        ) from errors[0]
    return found[0]


def _join(
    meeting: Meeting,
    rank: int,
    timeout_s: float,
    listener: Listener | None,
    device: torch.device | None,
) -> Group:
    limit = timedelta(seconds=timeout_s)
    store = _store(meeting, rank, limit, listener)
    kind = "cuda" if meeting.backend == "nccl" else "cpu"
    # What torch's own functions put before the keys of a group of this name.
    prefixed = c10d.PrefixStore(meeting.name, store)
    for prefix in (f"{meeting.name}/", f"{kind}/"):
        prefixed = c10d.PrefixStore(prefix, prefixed)
    if kind == "cpu":
        device = torch.device("cpu")
    elif device is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return Group(meeting, rank, device, _backend(meeting, rank, limit, prefixed), store)


def _store(meeting: Meeting, rank: int, limit: timedelta, listener: Listener | None) -> Any:
    given: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener.detach()}
    return c10d.TCPStore(
        meeting.address, meeting.port, meeting.size, rank == 0, timeout=limit, **given
    )


def _backend(meeting: Meeting, rank: int, limit: timedelta, store: Any) -> Any:
    if meeting.backend == "gloo":
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=_own_address(meeting))]
        return c10d.ProcessGroupGloo(store, rank, meeting.size, options)
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = limit
    return c10d.ProcessGroupNCCL(store, rank, meeting.size, options)


def _own_address(meeting: Meeting) -> str:
    """Of the interface by which this machine reaches the sender."""
    family = socket.AF_INET6 if ":" in meeting.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((meeting.address, meeting.port))  # sends nothing: it only finds the way
        return str(probe.getsockname()[0])


def broadcast(
    group: Group,
    flat: Tensor,
    timeout_s: float,
    *,
    src: int = 0,
    stopped: threading.Event | None = None,
) -> None:
    """Send the tensor from `src` to all members, or receive it in place.

    stopped: ends the wait from another thread. Raises WeightError then, when a member has gone,
    and when it takes longer than `timeout_s`; the group can not be used any more.
    """
    if flat.device.type != group.device.type:
        raise WeightError(
            f"a {group.meeting.backend} group can not broadcast a tensor on {flat.device}"
        )
    work = None
    try:
        work = group.backend.broadcast(flat, src, timeout=timedelta(seconds=timeout_s))
        _wait(work, timeout_s, stopped or threading.Event())
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()
    except RuntimeError as error:
        _abandon(group, work, timeout_s)
        raise WeightError(
            f"a broadcast of {flat.nbytes / 2**20:.1f} MiB in group {group.meeting.name!r} of "
            f"{group.meeting.size} failed: {_first_line(error)}"
        ) from error


def _wait(work: Any, timeout_s: float, stopped: threading.Event) -> None:
    deadline = time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not done within {timeout_s:g} s")
        if stopped.wait(timeout=POLL_S):
            raise RuntimeError("it was stopped")
    work.wait()  # ends: at once, it is complete; raises what went wrong


def leave(group: Group) -> None:
    """Give up membership. Idempotent."""
    with suppress(RuntimeError):
        group.backend.shutdown()  # ends: it waits for nobody


def _abandon(group: Group, work: Any, timeout_s: float) -> None:
    """Let what is under way end by itself: gloo can not be stopped, and NCCL may hang."""

    def end() -> None:
        with suppress(RuntimeError):
            group.backend.abort()
        deadline = time.monotonic() + timeout_s + 1
        while work is not None and not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.1)

    threading.Thread(target=end, name="abandoned broadcast", daemon=True).start()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
