"""The sender's end of a publish to other processes.

`Outbox` does the work, by plain calls, wherever the tensors are: in the thread of a trainer, or in
each process of a sharded one. `LocalSource` offers an outbox of this process to receivers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from paceline.errors import WeightError
from paceline.weights.base import Meeting, Parcel, Transport, WeightPlan
from paceline.weights.buckets import Bucket, Buffer, OneBuffer, buckets, describe
from paceline.weights.collective import Group, Listener, broadcast, join, leave
from paceline.weights.disk import WeightFolder, WriteConfig
from paceline.weights.handles import pack
from paceline.weights.shared_memory import Segment
from paceline.weights.tensors import checksums

if TYPE_CHECKING:
    from torch import Tensor

Tensors = Callable[[], Iterable[tuple[str, "Tensor"]]]
"""The tensors as they are now, under the names of a Hugging Face checkpoint, each once."""


class Outbox:
    """Hands out one publish after the other, parcel by parcel. Of one thread, but for `abort`."""

    def __init__(
        self,
        tensors: Tensors,
        *,
        write_config: WriteConfig | None = None,
        address: str = "127.0.0.1",
        is_sender: bool = True,
        timeout_s: float = 600.0,
        device: torch.device | None = None,
    ) -> None:
        """write_config: writes the model's configuration into a folder, for `disk`.

        address: of this machine, as receivers reach it. is_sender: False in the other processes of
        a sharded trainer, which take part in gathering the tensors and hand over what lies on
        their own GPU. timeout_s: for a meeting, and for one broadcast. device: of the tensors;
        absent: a CPU.
        """
        self._tensors = tensors
        self._write_config = write_config
        self._address = address
        self._is_sender = is_sender
        self._timeout_s = timeout_s
        self._device = device
        self._parcels: Iterator[Parcel] | None = None
        self._bucket: Bucket | None = None
        self._segment: Segment | None = None
        self._listener: Listener | None = None
        self._group: Group | None = None
        self._folder: WeightFolder | None = None
        self._stopped = threading.Event()
        self._dtype: torch.dtype | None = None

    def open(
        self,
        version: int,
        transport: Transport,
        bucket_bytes: int,
        folder: Path | None = None,
        dtype: str | None = None,
    ) -> None:
        """Start a publish; one that is open ends. folder: for `disk`. dtype: see `WeightPlan`."""
        self.close()
        self._dtype = None if dtype is None else getattr(torch, dtype)
        self._stopped.clear()
        if transport == "handles":
            self._parcels = self._by_handles(bucket_bytes)
        elif transport == "collective":
            self._parcels = self._by_collective(bucket_bytes)
        elif transport == "disk":
            if folder is None:
                raise WeightError("a publish by disk needs a folder, and the plan has none")
            self._parcels = self._by_disk(version, folder)
        else:
            raise WeightError(f"transport {transport!r} does not go between processes")

    def next_parcel(self) -> Parcel | None:
        """All receivers have the former one: make the next. None: that was the last."""
        if self._parcels is None:
            raise WeightError("no publish is open")
        return next(self._parcels, None)

    def broadcast(self) -> None:
        """Send the newest parcel to the group; returns when it has left."""
        if self._bucket is None:
            raise WeightError("there is no parcel to broadcast")
        if not self._is_sender:
            return
        group = self._joined()
        flat = self._bucket.flat
        try:
            broadcast(group, flat, self._timeout_s, stopped=self._stopped)
        except WeightError:
            self._leave()
            raise

    def meeting_point(self) -> tuple[str, int]:
        """Address and a port that is taken for the next meeting."""
        self._stopped.clear()
        if self._listener is not None:
            self._listener.close()
        self._listener = Listener(self._address)
        return self._listener.address, self._listener.port

    def meet(self, meeting: Meeting) -> None:
        """Join as rank 0 and stay; a group of another name is left."""
        if self._group is not None and self._group.meeting == meeting:
            return
        self._leave()
        listener, self._listener = self._listener, None
        if listener is None or listener.port != meeting.port:
            raise WeightError(
                f"meeting {meeting.name!r} is at port {meeting.port}, which is not the one that "
                "the sender keeps for it: ask for a meeting point first"
            )
        self._group = join(
            meeting,
            0,
            self._timeout_s,
            listener=listener,
            device=self._device,
            stopped=self._stopped,
        )

    def checksums(self) -> dict[str, str]:
        """Name of each tensor -> hash of what the trainer holds now."""
        found: dict[str, str] = {}
        for name, tensor in self._cast():
            if self._is_sender:
                found |= checksums({name: tensor})
        return found

    def numbers(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Copies of some of the tensors, on the host."""
        wanted = frozenset(names)
        found: dict[str, Tensor] = {}
        for name, tensor in self._cast():
            if self._is_sender and name in wanted:
                found[name] = tensor.detach().to("cpu", copy=True)
        return found

    def abort(self) -> None:
        """End the meeting or broadcast that another thread waits in: it raises there."""
        self._stopped.set()

    def close(self) -> None:
        """End the publish and give its memory back; the group stays. Idempotent."""
        parcels, self._parcels = self._parcels, None
        if parcels is not None:
            parcels.close()  # type: ignore[attr-defined]
        self._bucket = None
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def dispose(self) -> None:
        """Give back everything: the group, its port, the folder. Idempotent."""
        self.close()
        self._leave()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def _by_handles(self, bucket_bytes: int) -> Iterator[Parcel]:
        for bucket in self._buckets(bucket_bytes, self._shared, self._reserve):
            handles: tuple[str, ...] = ()
            if bucket.flat.is_cuda:
                torch.cuda.current_stream(bucket.flat.device).synchronize()
                handles = (pack(bucket.named()),)
            elif self._is_sender:
                handles = (pack(bucket.named(), self._segment),)
            yield Parcel(bucket.tensors, handles=handles)

    def _by_collective(self, bucket_bytes: int) -> Iterator[Parcel]:
        device = self._joined().device if self._is_sender else torch.device("meta")
        for bucket in self._buckets(bucket_bytes, OneBuffer(device)):
            yield Parcel(bucket.tensors)

    def _buckets(
        self,
        bucket_bytes: int,
        buffer: Buffer,
        reserve: Callable[[int], None] | None = None,
    ) -> Iterator[Bucket]:
        for bucket in buckets(self._cast(), bucket_bytes, buffer, reserve):
            self._bucket = bucket
            yield bucket
            self._bucket = None

    def _shared(self, size: int, device: torch.device) -> Tensor:
        """Memory that other processes can map."""
        if device.type == "cuda":
            # A new one each time: torch keeps the former one until its reader has let go of it.
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            return torch.empty(size, dtype=torch.uint8, device=device)
        if not self._is_sender:
            return torch.empty(size, dtype=torch.uint8, device="meta")
        if self._segment is None or self._segment.size < size:
            if self._segment is not None:
                self._segment.close()
            self._segment = Segment(size)
        return self._segment.tensor

    def _reserve(self, end: int) -> None:
        if self._segment is not None:
            self._segment.reserve(end)

    def _by_disk(self, version: int, folder: Path) -> Iterator[Parcel]:
        if not self._is_sender:
            for _ in self._tensors():
                pass
            return
        if self._folder is None or self._folder.path != folder:
            if self._folder is not None:
                self._folder.remove()
            self._folder = WeightFolder(folder, self._write_config)
        infos = []

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self._cast():
                infos.append(describe(name, tensor))
                yield name, tensor

        try:
            full, changed = self._folder.write(version, noted())
            yield Parcel(
                tuple(infos), folder=str(full), changed=None if changed is None else str(changed)
            )
        except BaseException:
            self._folder.forget()
            raise
        self._folder.acknowledge()

    def _cast(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors in the type in which they are sent."""
        for name, tensor in self._tensors():
            is_cast = self._dtype is not None and tensor.is_floating_point()
            yield name, tensor.to(self._dtype) if is_cast else tensor

    def _joined(self) -> Group:
        if self._group is None:
            raise WeightError("the sender has met nobody: `meet` comes before the first parcel")
        return self._group

    def _leave(self) -> None:
        if self._group is not None:
            leave(self._group)
            self._group = None


class Runs(Protocol):
    """Runs a call in the thread that the tensors belong to, and waits for it even if cancelled."""

    def __call__(self, work: Callable[[], Any], /) -> Awaitable[Any]: ...


class LocalSource:
    """Implements `paceline.weights.base.WeightSource` over an outbox of this process.

    One receiver at a time: a second one waits until the first has all parcels.
    """

    def __init__(self, outbox: Outbox, plan: WeightPlan, run: Runs) -> None:
        self._outbox = outbox
        self._plan = plan
        self._run = run
        self._turn = asyncio.Lock()

    async def parcels(self) -> AsyncIterator[Parcel]:
        """All tensors, each once. A parcel is valid until the next one is asked for."""
        plan, outbox = self._plan, self._outbox
        # ends: with the turn of another receiver, which `publish` gives a deadline
        async with self._turn:
            await self._run(
                lambda: outbox.open(
                    plan.version, plan.transport, plan.bucket_bytes, plan.folder, plan.dtype
                )
            )
            try:
                while (parcel := await self._run(outbox.next_parcel)) is not None:
                    yield parcel
            finally:
                await self._run(outbox.close)

    async def meeting_point(self) -> tuple[str, int]:
        """Address and a free port of the sender, for a new meeting."""
        point: tuple[str, int] = await self._run(self._outbox.meeting_point)
        return point

    async def meet(self, meeting: Meeting) -> None:
        """Join as rank 0; returns when all have."""
        if self._turn.locked():
            raise WeightError(
                f"meeting {meeting.name!r}: another receiver is being sent to; one sender has one "
                "group at a time"
            )
        await self._until_stopped(lambda: self._outbox.meet(meeting))

    async def broadcast(self, parcel: Parcel) -> None:
        """Send the newest parcel to the group. Cancelled, it ends, and so does the group."""
        await self._until_stopped(self._outbox.broadcast)

    async def _until_stopped(self, work: Callable[[], None]) -> None:
        """Wait for receivers in the tensors' thread, which is not kept when nobody waits here."""
        working = asyncio.ensure_future(self._run(work))
        try:
            await asyncio.shield(working)  # ends: with the work, which has a time limit
        except asyncio.CancelledError:
            self._outbox.abort()
            await asyncio.wait([working])  # ends: at once, the work was told to
            if not working.cancelled():
                working.exception()
            raise

    async def checksums(self) -> Mapping[str, str]:
        """Name of each tensor -> hash of what the trainer holds."""
        found: Mapping[str, str] = await self._run(self._outbox.checksums)
        return found

    async def numbers(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Copies of some of the tensors, on the host."""
        found: Mapping[str, Tensor] = await self._run(lambda: self._outbox.numbers(names))
        return found
