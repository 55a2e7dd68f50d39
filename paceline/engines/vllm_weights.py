"""New weights for one vLLM server, over each of the transports between processes.

Its workers have methods of Paceline's for that (`vllm_server/paceline_vllm.py`), which are called
through POST /collective_rpc. The version is told once, at the end.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode
from dataclasses import asdict
from typing import Any

import torch

from paceline.engines.answers import number_of
from paceline.engines.handed import own_handles
from paceline.engines.http import JsonClient, RefusedError
from paceline.errors import WeightError
from paceline.weights.base import Meeting, Parcel, TensorInfo, Transport
from paceline.weights.settings import WeightCheckConfig

CONTROL_S = 60.0
MARGIN_S = 10.0
"""Seconds that a worker has to tell of a time limit of its own."""


class VLLMWeights:
    """Implements `paceline.engines.replica.WeightIntake` and `OwnCheck`."""

    def __init__(
        self,
        url: str,
        client: JsonClient,
        *,
        policy: str,
        first_device: int,
        num_devices: int,
        timeout_s: float,
        takes_pickles: bool,
    ) -> None:
        """first_device: its first one among those of the whole engine. timeout_s: for one parcel.
        takes_pickles: False for servers that this program did not start."""
        self._url, self._client, self._policy = url, client, policy
        self._first_device, self.num_devices = first_device, num_devices
        self._timeout_s, self._takes_pickles = timeout_s, takes_pickles
        self.held = 0
        """Version of the weights that the next token is made with."""
        self.salt: str | None = None
        """Keeps prefixes that former weights computed apart, where they could not be dropped."""
        self.keeps_running = False
        """Whether requests keep their KV cache through the update."""

    async def version(self) -> int | None:
        try:
            found = await self._client.request(self._url, "/weight_info", timeout_s=CONTROL_S)
        except RefusedError:
            return None
        return number_of(found.get("weight_version")) if isinstance(found, dict) else None

    async def state(self, version: int) -> None:
        """Say which version it holds, without a change of weights."""
        await self._post("/update_weight_version", {"new_version": str(version)})
        self.held = version

    async def join(self, meeting: Meeting, first_rank: int) -> None:
        await self._call("paceline_join", asdict(meeting), first_rank, self._timeout_s)

    async def begin(self, transport: Transport) -> None:
        await self._call("paceline_begin")

    async def take(self, parcel: Parcel, transport: Transport) -> None:
        match transport:
            case "handles":
                await self._call("paceline_take_handles", self._handles(parcel))
            case "collective":
                tensors = [[i.name, i.dtype, list(i.shape)] for i in parcel.tensors]
                await self._call("paceline_take_broadcast", tensors, self._timeout_s)
            case "disk" if parcel.folder is not None:
                await self._call("paceline_take_folder", parcel.folder, parcel.changed)
            case _:
                raise WeightError(f"{self._named}: a parcel of transport {transport!r} is empty")

    def _handles(self, parcel: Parcel) -> list[str]:
        if not self._takes_pickles:
            raise WeightError(
                f"{self._named}: transport `handles` sends pickles, which go to servers only that "
                'were started here; set engine.weights = "collective" or "disk"'
            )
        return own_handles(parcel, self._first_device, self.num_devices, self._named)

    async def end(self, version: int) -> None:
        await self._call("paceline_end")
        # Prefixes of former weights must not serve new requests.
        dropped = None if self.keeps_running else await self._post("/reset_prefix_cache")
        if not (isinstance(dropped, dict) and dropped.get("success")):
            self.salt = f"version {version}"
        await self.state(version)

    async def reset(self, version: int, check: WeightCheckConfig) -> None:
        """See `paceline.engines.replica.OwnCheck`."""
        await self._call("paceline_reset", list(check.skip))

    async def compare(self, check: WeightCheckConfig) -> list[str] | None:
        """It can not tell. See `paceline.engines.replica.OwnCheck`."""
        return None

    async def read(self, info: TensorInfo) -> list[float] | None:
        parts = await self._call("paceline_read", info.name)
        if not all("numbers" in part for part in parts):
            return None
        return await asyncio.to_thread(_joined, parts, info.shape)

    async def _call(self, method: str, *values: Any) -> list[dict[str, Any]]:
        """What each device answers. Raises WeightError if it did not go well on one."""
        body = {"method": method, "args": list(values)}
        answer = await self._post("/collective_rpc", body, self._timeout_s + MARGIN_S)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not results or not all(isinstance(result, dict) for result in results):
            raise WeightError(f"{self._named}: {method} was not understood: {answer!r}")
        for result in results:
            if (error := result.get("error")) is not None:
                raise WeightError(f"{self._named}: {error}")
        return list(results)

    async def _post(
        self, path: str, body: dict[str, Any] | None = None, timeout_s: float = CONTROL_S
    ) -> Any:
        try:
            return await self._client.request(
                self._url, path, body, timeout_s=timeout_s, method="POST"
            )
        except RefusedError as error:
            raise WeightError(f"{self._named}: {error}") from None

    @property
    def _named(self) -> str:
        return f"policy {self._policy!r}, {self._url}"


def _joined(parts: list[dict[str, Any]], shape: tuple[int, ...]) -> list[float] | None:
    """The numbers of a tensor of which each device holds all, or so many rows or columns; None if
    they do not come to its shape."""
    tensors = [
        torch.frombuffer(bytearray(b64decode(part["numbers"])), dtype=torch.float32).view(
            part["shape"]
        )
        for part in parts
    ]
    # Where each has all of it and one differs, that one is shown.
    whole = next((t for t in tensors if not torch.equal(t, tensors[0])), tensors[0])
    for dim in range(len(shape) if len(shape) == whole.dim() and whole.shape != shape else 0):
        joined = torch.cat(tensors, dim)
        # Embeddings may have further rows, which no checkpoint has.
        if joined.shape[dim] == shape[dim] or dim == 0 < shape[0] < len(joined):
            whole = joined.narrow(dim, 0, shape[dim])
            if whole.shape == shape:
                break
    found: list[float] = whole.flatten().tolist()
    return found if whole.shape == shape else None
