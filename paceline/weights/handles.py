"""Tensors in memory that another process can map, as text: what a publish by handles posts.

The text is base64 of a pickle of `list[tuple[name, Tensor]]`, in the form in which torch's own
processes hand tensors to each other: SGLang reads it, and `unpack` does.
"""

from __future__ import annotations

import binascii
import io
import pickle
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing import reductions

from paceline.errors import WeightError

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.weights.shared_memory import Segment

DEVICE = 6
"""Where the device stands among what torch rebuilds a CUDA tensor from."""


def pack(named: Iterable[tuple[str, Tensor]], segment: Segment | None = None) -> str:
    """Tensors of a GPU, or views of the segment, as text. The memory must stay until all have it.

    Of GPU memory, each text is for one reader: torch counts them.
    """
    buffer = io.BytesIO()
    try:
        _Packer(buffer, segment).dump(list(named))
    except pickle.PicklingError as error:
        raise WeightError(f"weights can not be handed over: {error}") from error
    return b64encode(buffer.getvalue()).decode()


def unpack(text: str) -> list[tuple[str, Tensor]]:
    """The tensors, in the sender's memory: copy them before the sender goes on.

    Raises WeightError for a pickle of anything else, and if the memory has gone.
    """
    try:
        found = _Unpacker(io.BytesIO(b64decode(text, validate=True))).load()
    except (pickle.UnpicklingError, binascii.Error, EOFError, ValueError, TypeError) as error:
        raise WeightError(f"these are no handles of tensors: {error}") from error
    except RuntimeError as error:
        raise WeightError(
            f"the sender's memory can not be mapped: {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(found, list) or not all(map(_is_named_tensor, found)):
        raise WeightError("these are no handles of tensors: not a list of (name, tensor)")
    return found


def _is_named_tensor(item: object) -> bool:
    return (
        isinstance(item, tuple)
        and len(item) == 2
        and isinstance(item[0], str)
        and isinstance(item[1], torch.Tensor)
    )


class _Packer(ForkingPickler):
    def __init__(self, buffer: io.BytesIO, segment: Segment | None) -> None:
        super().__init__(buffer)
        self._segment = segment

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, torch.UntypedStorage):
            return self._reduce_storage(value)
        if isinstance(value, torch.Tensor) and value.is_cuda:
            rebuild, parts = reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
            # Each process may number the machine's GPUs in its own way.
            uuid = str(torch.cuda.get_device_properties(value.device).uuid)
            return rebuild, (*parts[:DEVICE], uuid, *parts[DEVICE + 1 :])
        return NotImplemented

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        segment = self._segment
        if segment is None or not segment.owns(storage):
            raise pickle.PicklingError("a tensor on the CPU does not lie in shared memory")
        parts = (segment.manager.encode(), segment.name.encode(), segment.size)
        return reductions.rebuild_storage_filename, (torch.UntypedStorage, *parts)


def _rebuild_cuda_tensor(*parts: Any) -> Any:
    device = parts[DEVICE]
    if isinstance(device, str):
        device = _device_index(device)
    rebuild: Callable[..., Any] = reductions.rebuild_cuda_tensor
    return rebuild(*parts[:DEVICE], device, *parts[DEVICE + 1 :])


def _device_index(uuid: str) -> int:
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise RuntimeError(f"this process does not see the sender's GPU {uuid}")


_REBUILD = "torch.multiprocessing.reductions"
_ALLOWED: dict[tuple[str, str], object] = {
    ("torch", "Tensor"): torch.Tensor,
    ("torch._tensor", "Tensor"): torch.Tensor,
    ("torch", "Size"): torch.Size,
    ("torch", "UntypedStorage"): torch.UntypedStorage,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("torch.storage", "TypedStorage"): torch.storage.TypedStorage,
    (_REBUILD, "rebuild_tensor"): reductions.rebuild_tensor,
    (_REBUILD, "rebuild_typed_storage"): reductions.rebuild_typed_storage,
    (_REBUILD, "rebuild_storage_filename"): reductions.rebuild_storage_filename,
    (_REBUILD, "rebuild_cuda_tensor"): _rebuild_cuda_tensor,
}


class _Unpacker(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        found = _ALLOWED.get((module, name))
        if found is None and module == "torch":
            candidate = getattr(torch, name, None)
            found = candidate if isinstance(candidate, torch.dtype) else None
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in it")
        return found  # type: ignore[return-value]
