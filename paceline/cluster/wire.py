"""How a driver and the workers that it started talk: pickles over the socket pair between them.

A message is a number and some parts: a pickle (protocol 5), then the buffers of its arrays, which
are not copied into it. Large messages go through memory without a name that the other end maps: it
is written once for all ranks and read without a copy, and it is gone with the last process that
has it, however that one ends. Both ends were made by this package, and nobody else holds an end,
so pickles are safe here.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import cloudpickle

HEAD = struct.Struct(">QI")
"""Number of the request, and of its parts."""
LENGTH = struct.Struct(">Q")
SHARED = 2**31
"""Set in the number of parts: they follow as one file of shared memory, whose path follows."""
MIN_SHARED_BYTES = 2**20
"""From here on shared memory is faster than the socket."""
ALIGNMENT = 64

Buffer = bytes | bytearray | memoryview
Message = list[Buffer]
"""A pickle and its buffers."""


def encode(value: Any, *, by_value: bool = False) -> Message:
    """`by_value`: functions and classes of scripts and notebooks go by their code.

    Raises whatever pickling the value raises.
    """
    buffers: list[pickle.PickleBuffer] = []
    dumps: Callable[..., bytes] = cloudpickle.dumps if by_value else pickle.dumps
    body = dumps(value, protocol=5, buffer_callback=buffers.append)
    return [body, *(buffer.raw() for buffer in buffers)]


def decode(message: Message) -> Any:
    """Raises whatever unpickling raises. Arrays share memory with the message, and are writable."""
    body, *buffers = message
    return pickle.loads(body, buffers=buffers)


def size_of(message: Message) -> int:
    """In bytes."""
    return sum(len(part) for part in message)


class Packed:
    """A message ready to be sent, to one or several ranks; closed by who made it."""

    def __init__(self, message: Message, *, min_shared_bytes: int = MIN_SHARED_BYTES) -> None:
        self._lengths = [len(part) for part in message]
        self._memory: int | None = None
        self._parts: Message = message
        if size_of(message) >= min_shared_bytes and hasattr(os, "memfd_create"):
            self._memory = os.memfd_create("paceline")
            try:
                for part, start in zip(message, _starts(self._lengths), strict=True):
                    _write_at(self._memory, part, start)
            except BaseException:
                self.close()
                raise
            self._parts = [f"/proc/{os.getpid()}/fd/{self._memory}".encode()]

    @property
    def path(self) -> Buffer:
        """Of its shared memory."""
        assert self._memory is not None
        return self._parts[0]

    def parts(self, number: int) -> Iterable[Buffer]:
        """What goes over the socket."""
        shared = SHARED if self._memory is not None else 0
        yield HEAD.pack(number, len(self._lengths) | shared)
        yield b"".join(LENGTH.pack(length) for length in self._lengths)
        if self._memory is not None:
            yield LENGTH.pack(len(self.path))
        yield from self._parts

    def close(self) -> None:
        """Let the memory go: those who have mapped it keep it. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is not None:
            os.close(memory)


@dataclass(frozen=True, slots=True)
class _Head:
    number: int
    count: int
    is_shared: bool

    @classmethod
    def of(cls, data: Buffer) -> _Head:
        number, count = HEAD.unpack(data)
        return cls(number, count & ~SHARED, bool(count & SHARED))


def write(pipe: socket.socket, number: int, packed: Packed) -> None:
    """For a worker: blocks until all has left. Raises OSError if the driver is gone."""
    for part in packed.parts(number):
        pipe.sendall(part)


def read(pipe: socket.socket) -> tuple[int, Message]:
    """For a worker: blocks until a message comes. Raises EOFError if the driver is gone."""
    head = _Head.of(_take(pipe, HEAD.size))
    lengths = [LENGTH.unpack(_take(pipe, LENGTH.size))[0] for _ in range(head.count)]
    if not head.is_shared:
        return head.number, [_take(pipe, length) for length in lengths]
    (length,) = LENGTH.unpack(_take(pipe, LENGTH.size))
    return head.number, map_message(_take(pipe, length), lengths)


def _take(pipe: socket.socket, length: int) -> bytearray:
    taken = bytearray(length)
    view = memoryview(taken)
    while view:
        got = pipe.recv_into(view)
        if not got:
            raise EOFError("the other end was closed")
        view = view[got:]
    return taken


async def send(pipe: socket.socket, number: int, packed: Packed) -> None:
    """For the driver, whose socket does not block. The caller sets the limit."""
    loop = asyncio.get_running_loop()
    for part in packed.parts(number):
        await loop.sock_sendall(pipe, part)


async def receive(pipe: socket.socket) -> tuple[int, Message]:
    """For the driver. Raises EOFError or OSError if the worker is gone. The caller sets the limit.

    The message must have been read before the next one is sent.
    """
    head = _Head.of(await _receive(pipe, HEAD.size))
    packed = await _receive(pipe, LENGTH.size * head.count)
    lengths = [length for (length,) in LENGTH.iter_unpack(packed)]
    if not head.is_shared:
        return head.number, [await _receive(pipe, length) for length in lengths]
    (length,) = LENGTH.unpack(await _receive(pipe, LENGTH.size))
    return head.number, map_message(await _receive(pipe, length), lengths)


async def _receive(pipe: socket.socket, length: int) -> bytearray:
    loop = asyncio.get_running_loop()
    taken = bytearray(length)
    view = memoryview(taken)
    while view:
        got = await loop.sock_recv_into(pipe, view)
        if not got:
            raise EOFError("the other end was closed")
        view = view[got:]
    return taken


def map_message(path: Buffer, lengths: list[int]) -> Message:
    """The parts of a message in memory of another process. Raises OSError if that one is gone."""
    memory = os.open(bytes(path), os.O_RDONLY)
    try:
        size = os.fstat(memory).st_size
        # Private: what a reader writes into its arrays stays its own.
        access = mmap.PROT_READ | mmap.PROT_WRITE
        view = memoryview(mmap.mmap(memory, size, flags=mmap.MAP_PRIVATE, prot=access))
    finally:
        os.close(memory)
    starts = _starts(lengths)
    return [view[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def _starts(lengths: list[int]) -> list[int]:
    starts, end = [], 0
    for length in lengths:
        starts.append(end)
        end += -(-length // ALIGNMENT) * ALIGNMENT
    return starts


def _write_at(memory: int, part: Buffer, start: int) -> None:
    view = memoryview(part)
    while view:
        written = os.pwrite(memory, view, start)
        view, start = view[written:], start + written
