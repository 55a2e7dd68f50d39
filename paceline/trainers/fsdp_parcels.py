"""The sender's end of a publish, in one rank of a sharded trainer.

All ranks make the parcels together, since each tensor is gathered from all of them. Rank 0 hands
them over; on GPUs every rank does, for the engine that shares its device. What waits for receivers
runs in a thread, so that the rank answers in the meantime, and can be told to give up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import WeightError
from paceline.models import write_model_files
from paceline.trainers.fsdp_ranks import Ranks
from paceline.trainers.fsdp_shards import whole
from paceline.weights.adapters import merged_tensors
from paceline.weights.base import Meeting, Parcel, Transport
from paceline.weights.naming import as_checkpoint, own_tensors
from paceline.weights.source import Outbox

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


class Parcels:
    """An outbox of shards."""

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase | None,
        ranks: Ranks,
        *,
        address: str,
    ) -> None:
        """address: of this rank's machine, as receivers reach it."""
        self._model = model
        self._ranks = ranks
        self._outbox = Outbox(
            self._tensors,
            write_config=lambda folder: write_model_files(model, tokenizer, folder),
            address=address,
            is_sender=ranks.index == 0,
            device=ranks.device,
        )
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="parcels")
        self._sent: Future[None] | None = None

    def open(
        self,
        version: int,
        transport: Transport,
        bucket_bytes: int,
        folder: Path | None,
        dtype: str | None = None,
    ) -> None:
        """Start a publish; one that is open ends."""
        self._outbox.open(version, transport, bucket_bytes, folder, dtype)

    def next(self) -> Parcel | None:
        """The next one, gathered by all ranks; None after the last."""
        with torch.no_grad():
            return self._outbox.next_parcel()

    def close(self) -> None:
        """End the publish; the group of a broadcast stays. Idempotent."""
        self._outbox.close()

    def meeting_point(self) -> tuple[str, int] | None:
        """Of rank 0, for a new meeting."""
        return self._outbox.meeting_point() if self._ranks.index == 0 else None

    def begin_meet(self, meeting: Meeting) -> None:
        """Join as rank 0."""
        self._begin(lambda: self._outbox.meet(meeting))

    def begin_broadcast(self) -> None:
        """Send the newest parcel."""
        self._begin(self._outbox.broadcast)

    def has_sent(self, limit_s: float) -> bool:
        """What was begun is done. Waits so long for it; an error of it is raised here."""
        if self._sent is None:
            return True
        wait([self._sent], timeout=limit_s)
        if not self._sent.done():
            return False
        sent, self._sent = self._sent, None
        sent.result()  # ends: it is done
        return True

    def give_up(self) -> None:
        """End a broadcast that nobody receives; the group ends with it."""
        self._outbox.abort()

    def checksums(self) -> dict[str, str]:
        """Name of each tensor -> hash; of rank 0."""
        with torch.no_grad():
            return self._outbox.checksums()

    def numbers(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Copies of some of the tensors, on the host; of rank 0."""
        with torch.no_grad():
            return self._outbox.numbers(names)

    def dispose(self) -> None:
        """Give back everything. Idempotent."""
        self._outbox.abort()
        # ends: it was aborted, or by its own limit
        self._sender.shutdown(wait=True, cancel_futures=True)
        self._outbox.dispose()

    def _begin(self, work: Callable[[], None]) -> None:
        if self._ranks.index != 0:
            return
        if self._sent is not None and not self._sent.done():
            raise WeightError("the trainer still waits for receivers of an earlier publish")
        self._sent = self._sender.submit(work)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        full = merged_tensors(
            self._model,
            own_tensors(self._model),
            lambda tensor: whole(tensor, self._ranks.device),
        )
        return as_checkpoint(self._model, full)
