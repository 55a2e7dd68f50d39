"""New weights for one SGLang server, over each of the transports between processes.

    begin    POST /begin_weight_update                 (from 0.5.21 on, where it is needed)
    take     POST /update_weights_from_tensor          transport `handles`
             POST /update_weights_from_distributed     transport `collective`
             POST /update_weights_from_disk            transport `disk`
    end      POST /end_weight_update, /flush_cache, /update_weight_version

The version is told once, at the end: a server that names versions by token sees one change.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from paceline.engines.answers import number_of
from paceline.engines.handed import own_handles
from paceline.engines.http import JsonClient, RefusedError
from paceline.engines.sglang_check import SGLangCheck
from paceline.errors import WeightError
from paceline.weights.base import Meeting, Parcel, TensorInfo, Transport
from paceline.weights.settings import WeightCheckConfig

logger = logging.getLogger(__name__)

FLUSHES, FLUSH_AGAIN_S = 8, 0.1
"""A server that was asked a moment ago to pause may not have come to it yet."""
CONTROL_S = 60.0
ABSENT = (404, 405)


class SGLangWeights:
    """Implements `paceline.engines.replica.WeightIntake`."""

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
        compares: bool = False,
    ) -> None:
        """first_device: its first one among those of the whole engine. timeout_s: for one parcel.
        takes_pickles: False for servers that this program did not start. compares: whether it can
        compare its weights with those of the model's folder."""
        self._url, self._client, self._policy = url, client, policy
        self._first_device, self.num_devices = first_device, num_devices
        self._timeout_s, self._takes_pickles = timeout_s, takes_pickles
        self._group: str | None = None
        self._has_sessions, self._is_open = True, False
        self._check = SGLangCheck(self._ask, named=self._named, compares=compares)
        self.held = 0
        """Version of the weights that the next token is made with."""
        self.salt: str | None = None
        """Keeps prefixes that former weights computed apart, where they could not be dropped."""
        self.keeps_running = False
        """Whether requests keep their KV cache through the update."""

    async def version(self) -> int | None:
        for path in ("/model_info", "/get_model_info"):
            try:
                found = await self._client.request(self._url, path, timeout_s=CONTROL_S)
            except RefusedError:
                continue
            return number_of(found.get("weight_version")) if isinstance(found, dict) else None
        return None

    async def state(self, version: int) -> None:
        """Say which version it holds, without a change of weights."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._post("/update_weight_version", body)
        self.held = version

    async def join(self, meeting: Meeting, first_rank: int) -> None:
        if self._group is not None:
            former, self._group = self._group, None
            try:
                await self._ask("/destroy_weights_update_group", {"group_name": former})
            except RefusedError as error:
                logger.warning("%s", error)
        self._group = meeting.name
        body = {
            "master_address": meeting.address,
            "master_port": meeting.port,
            "rank_offset": first_rank,
            "world_size": meeting.size,
            "group_name": meeting.name,
            "backend": meeting.backend,
        }
        await self._post("/init_weights_update_group", body, self._timeout_s)

    async def begin(self, transport: Transport) -> None:
        if transport == "disk" or not self._has_sessions:
            return
        try:
            await self._ask("/begin_weight_update", {"selector": "all"})
        except RefusedError as error:
            if error.status in ABSENT:
                self._has_sessions = False
                return
            # An update that failed half-way may have left one open.
            await self._post("/end_weight_update", {})
            await self._post("/begin_weight_update", {"selector": "all"})
        self._is_open = True

    async def take(self, parcel: Parcel, transport: Transport) -> None:
        match transport:
            case "handles":
                await self._post("/update_weights_from_tensor", self._handles(parcel))
            case "collective":
                await self._post("/update_weights_from_distributed", self._received(parcel))
            case "disk" if (folder := parcel.changed or parcel.folder) is not None:
                # Loaded as the model was; the cache is dropped at the end.
                body = {"model_path": folder, "flush_cache": False}
                await self._post("/update_weights_from_disk", body, self._timeout_s)
            case _:
                raise WeightError(f"{self._named}: a parcel of transport {transport!r} is empty")

    def _handles(self, parcel: Parcel) -> dict[str, Any]:
        if not self._takes_pickles:
            raise WeightError(
                f"{self._named}: transport `handles` sends pickles, which go to servers only that "
                'were started here; set engine.weights = "collective" or "disk"'
            )
        own = own_handles(parcel, self._first_device, self.num_devices, self._named)
        return {"serialized_named_tensors": own, "load_format": None, "flush_cache": False}

    def _received(self, parcel: Parcel) -> dict[str, Any]:
        if self._group is None:
            raise WeightError(f"{self._named} has not met with the trainer")
        return {
            "names": [tensor.name for tensor in parcel.tensors],
            "dtypes": [tensor.dtype for tensor in parcel.tensors],
            "shapes": [list(tensor.shape) for tensor in parcel.tensors],
            "group_name": self._group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }

    async def end(self, version: int) -> None:
        if self._is_open:
            await self._post("/end_weight_update", {})
            self._is_open = False
        await self._flush(version)
        await self.state(version)

    async def _flush(self, version: int) -> None:
        """Prefixes of former weights must not serve new requests."""
        for attempt in range(1 if self.keeps_running else FLUSHES):
            if attempt:
                await asyncio.sleep(FLUSH_AGAIN_S)
            try:
                await self._ask("/flush_cache", {})
            except RefusedError as error:
                problem = error
            else:
                return
        if not self.keeps_running:
            logger.warning("%s; prefixes are kept apart by version instead", problem)
        self.salt = f"version {version}"

    async def reset(self, version: int, check: WeightCheckConfig) -> None:
        """See `paceline.engines.replica.OwnCheck`."""
        await self._check.reset(check, comes_back=version == self.held)

    async def compare(self, check: WeightCheckConfig) -> list[str] | None:
        """See `paceline.engines.replica.OwnCheck`."""
        return await self._check.compare(check)

    async def read(self, info: TensorInfo) -> list[float] | None:
        rows = info.shape[0] if info.shape else 1
        body = {"name": info.name, "truncate_size": rows}
        try:
            shown = await self._ask("/get_weights_by_name", body)
        except RefusedError:
            return None
        return _flat(shown) if isinstance(shown, list) else None

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> Any:
        try:
            return await self._ask(path, body, timeout_s)
        except RefusedError as error:
            raise WeightError(f"{self._named}: {error}") from None

    async def _ask(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> Any:
        limit = self._timeout_s if timeout_s is None else timeout_s
        return await self._client.request(self._url, path, body, timeout_s=limit)

    @property
    def _named(self) -> str:
        return f"policy {self._policy!r}, {self._url}"


def _flat(shown: list[Any]) -> list[float]:
    if shown and isinstance(shown[0], list):
        return [number for part in shown for number in _flat(part)]
    return [float(number) for number in shown]
