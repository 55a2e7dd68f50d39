"""What runs inside a vLLM server: new weights for its workers, and a key for its HTTP API.

    --worker-extension-cls paceline_vllm.PacelineWeights     methods for POST /collective_rpc
    --middleware paceline_vllm.KeyRequired                   if it is open to the network

The server's environment has vLLM and torch, of its own versions, and no Paceline. So this module
is found by a PYTHONPATH that has nothing else on it, and takes from Paceline only what needs torch
alone, by its place. vLLM itself has ways for new weights, but each needs CUDA.

Weights are loaded as those of a checkpoint are, layer by layer (vLLM's `reload`), since a layer may
keep them in another form, and on a CPU keeps nothing but that form.
"""

from __future__ import annotations

import hmac
import importlib
import importlib.util
import json
import logging
import os
import sys
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

KEY = "PACELINE_SERVER_KEY"
"""Environment variable with the key that a server asks for."""
EYE_ROWS = 1024
RELOAD = "vllm.model_executor.model_loader.reload.layerwise"

Named = Iterable[tuple[str, torch.Tensor]]


class PacelineWeights:
    """Mixed into the worker of each device by vLLM. Values and answers are JSON; a problem is told
    as {"error": text}, since an exception would be that of a broken server."""

    def paceline_join(self, meeting: dict[str, Any], rank: int, timeout_s: float) -> dict[str, Any]:
        """rank: of the server's first device in the meeting."""
        return _told(lambda: _intake(self).join(meeting, rank, timeout_s))

    def paceline_begin(self) -> dict[str, Any]:
        """An update that was begun and not ended is given up."""
        return _told(_intake(self).begin)

    def paceline_take_handles(self, handles: list[str]) -> dict[str, Any]:
        """handles: one for each device of the server."""
        return _told(lambda: _intake(self).take_handles(handles))

    def paceline_take_broadcast(self, tensors: list[list[Any]], timeout_s: float) -> dict[str, Any]:
        """tensors: name, type and shape of each, in order."""
        return _told(lambda: _intake(self).take_broadcast(tensors, timeout_s))

    def paceline_take_folder(self, folder: str, changed: str | None) -> dict[str, Any]:
        """changed: a folder with only what differs from the weights that are held."""
        return _told(
            lambda: _intake(self).take_folder(Path(folder), Path(changed) if changed else None)
        )

    def paceline_end(self) -> dict[str, Any]:
        """Put what has come in use. An error if a weight of the model was not among it."""
        return _told(_intake(self).end)

    def paceline_reset(self, skip: list[str]) -> dict[str, Any]:
        """Fill all weights with other numbers. skip: names of a checkpoint's tensors, with `*`,
        whose layers stay as they are."""
        return _told(lambda: _intake(self).reset(skip))

    def paceline_read(self, name: str) -> dict[str, Any]:
        """{"shape": [...], "numbers": base64 of float32} of the part of a checkpoint's tensor that
        this device holds; {} if it can not be shown."""
        return _told(lambda: _intake(self).read(name))


def _told(work: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    try:
        with torch.no_grad():
            return work() or {}
    except Exception as error:  # told to whoever asked
        logging.getLogger("vllm.paceline").exception("new weights failed")
        return {"error": f"{type(error).__name__}: {error}"}


def _intake(worker: Any) -> Intake:
    found: Intake | None = getattr(worker, "paceline_intake", None)
    if found is None:
        found = worker.paceline_intake = Intake(worker)
    return found


class Intake:
    """New weights for one device."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._group: Any = None
        self._is_open = self._is_partial = False

    @property
    def _model(self) -> Any:
        return self._worker.model_runner.get_model()

    def join(self, meeting: dict[str, Any], rank: int, timeout_s: float) -> None:
        collective = paceline("weights.collective")
        if self._group is not None:
            collective.leave(self._group)
            self._group = None
        place = paceline("weights.base").Meeting(**meeting)
        own = rank + _tensor_parallel()[0]
        device = torch.device(self._worker.device)
        self._group = collective.join(place, own, timeout_s, device=device)

    def begin(self) -> None:
        if self._is_open:
            self._finish()
        _vllm(RELOAD).initialize_layerwise_reload(self._model)
        self._is_open, self._is_partial = True, False

    def take_handles(self, handles: list[str]) -> None:
        rank, size = _tensor_parallel()
        if len(handles) != size:
            raise ValueError(f"{len(handles)} handles came for {size} devices")
        self._load(paceline("weights.handles").unpack(handles[rank]))

    def take_broadcast(self, tensors: list[list[Any]], timeout_s: float) -> None:
        if self._group is None:
            raise ValueError("it has not met with the trainer")
        base, buckets = paceline("weights.base"), paceline("weights.buckets")
        infos = [base.TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in tensors]
        size = sum(map(buckets.num_bytes, infos))
        flat = torch.empty(size, dtype=torch.uint8, device=self._group.device)
        try:
            paceline("weights.collective").broadcast(self._group, flat, timeout_s)
        except Exception:
            self._group = None
            raise
        self._load(buckets.views(flat, infos))

    def take_folder(self, folder: Path, changed: Path | None) -> None:
        if changed is None:
            self._load(paceline("weights.disk").read_folder(folder))
        else:
            self._is_partial = True
            self._load(self._changed(folder, changed))

    def _changed(self, folder: Path, changed: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """What differs, with what else is in the same layers: a layer is loaded as a whole."""
        from safetensors import safe_open

        files, new = _files_of(folder), _files_of(changed)
        layers = {self._layer_of(name) for name in new}
        yield from paceline("weights.disk").read_folder(changed)
        for name, file in files.items():
            if name not in new and self._layer_of(name) in layers:
                with safe_open(folder / file, "pt") as opened:
                    yield name, opened.get_tensor(name)

    def _layer_of(self, name: str) -> str:
        """The layer of the model that a tensor of a checkpoint is part of."""
        path = name.rpartition(".")[0].partition(".experts.")[0]
        parent, _, last = path.rpartition(".")
        fused = {part: own for own, parts in self._fused().items() for part in parts}
        return f"{parent}.{fused.get(last, last)}"

    def _fused(self) -> dict[str, list[str]]:
        return getattr(self._model, "packed_modules_mapping", None) or {}

    def _load(self, tensors: Named) -> None:
        if not self._is_open:
            raise ValueError("no update of weights was begun")
        with self._configured():
            # Kept until their layer is complete: longer than the sender's memory is valid.
            self._model.load_weights((name, tensor.clone()) for name, tensor in tensors)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def end(self) -> None:
        if not self._is_open:
            raise ValueError("no update of weights was begun")
        missing = list(self._missing())
        self._finish()
        if missing:
            raise ValueError(f"weights of {len(missing)} layers did not come: {missing[:5]}")

    def _finish(self) -> None:
        reload = _vllm(RELOAD)
        # It would warn of each layer without new weights, such as a tied one.
        level = reload.logger.level
        reload.logger.setLevel(logging.ERROR)
        try:
            with self._configured():
                reload.finalize_layerwise_reload(self._model, self._worker.vllm_config.model_config)
        finally:
            reload.logger.setLevel(level)
            self._is_open = False
        self._pack_again()

    def _pack_again(self) -> None:
        """On a CPU a tied output layer has a packed copy of its own, which no reload renews."""
        for layer in self._model.modules():
            if hasattr(layer, "cpu_linear") and _is_embedding(layer):
                _pack(layer, remove_weight=False)

    def _missing(self) -> Iterator[str]:
        """Layers whose weights did not come, or in part only."""
        info_of = _vllm(RELOAD).get_layerwise_info
        came: set[int] = set()
        waiting: dict[str, set[int]] = {}
        for name, layer in self._model.named_modules():
            info = info_of(layer)
            if not info.can_load():  # complete, and in use already
                came |= {id(tensor) for tensor in layer.parameters(recurse=False)}
                continue
            own = {id(tensor) for tensor in info.kernel_tensors[0].values()}
            if info.load_numel == 0:
                waiting[name] = own
            elif _is_embedding(layer):  # it has rows that no checkpoint has
                came |= own
            elif type(getattr(layer, "quant_method", None)).__name__.startswith("Unquantized"):
                yield f"{name} (in part)"
        if not self._is_partial:
            # A tied layer has the very tensors of another one.
            yield from (name for name, own in waiting.items() if not own <= came)

    def reset(self, skip: list[str]) -> None:
        parts_of = self._fused()
        for path, layer in self._model.named_modules():
            parent, _, last = path.rpartition(".")
            for kind, tensor in list(layer.named_parameters(recurse=False)):
                names = [f"{parent}.{part}.{kind}" for part in parts_of.get(last, [last])]
                if any(fnmatchcase(name, pattern) for name in names for pattern in skip):
                    continue
                if tensor.numel():
                    tensor.copy_(torch.rand(tensor.shape).to(tensor) - 0.5)
                elif hasattr(layer, "cpu_linear"):
                    self._pack_noise(layer)
        self._pack_again()

    def _pack_noise(self, layer: Any) -> None:
        """Of a packed layer, whose weight is there in no other form."""
        like = self._unpacked(layer, int(layer.input_size_per_partition))
        noise = (torch.rand(like.shape) - 0.5).to(like.dtype)
        layer.weight = torch.nn.Parameter(noise, requires_grad=False)
        _pack(layer, remove_weight=True)

    def read(self, name: str) -> dict[str, Any] | None:
        found = self._find(name)
        if found is None:
            return None
        numbers = found.detach().to("cpu", torch.float32).contiguous()
        text = b64encode(numbers.numpy().tobytes()).decode()
        return {"shape": list(numbers.shape), "numbers": text}

    def _find(self, name: str) -> torch.Tensor | None:
        path, _, kind = name.rpartition(".")
        modules = dict(self._model.named_modules())
        if (layer := modules.get(path)) is not None:
            return self._held(layer, kind)
        parent, _, last = path.rpartition(".")
        for fused, parts in self._fused().items():
            layer = modules.get(f"{parent}.{fused}")
            if last in parts and layer is not None and hasattr(layer, "output_sizes"):
                devices = _tensor_parallel()[1]
                place, sizes = parts.index(last), [s // devices for s in layer.output_sizes]
                tensor = self._held(layer, kind)
                start = sum(sizes[:place])
                return None if tensor is None else tensor[start : start + sizes[place]]
        return None

    def _held(self, layer: Any, kind: str) -> torch.Tensor | None:
        """A tensor of the layer as the layer uses it."""
        tensor: torch.Tensor | None = getattr(layer, kind, None)
        if tensor is None or kind != "weight" or not hasattr(layer, "cpu_linear"):
            return tensor
        if not _is_embedding(layer):
            return self._unpacked(layer, int(layer.input_size_per_partition))
        for output in self._model.modules():
            # The output layer of a tied model has a copy that may be another one.
            if output is not layer and _is_embedding(output) and output.weight is layer.weight:
                packed = self._unpacked(output, tensor.shape[1])
                return tensor if torch.equal(packed, tensor) else packed
        return tensor

    def _unpacked(self, layer: Any, width: int) -> torch.Tensor:
        """What a packed layer multiplies with, bit for bit: its answers to unit vectors."""
        dtype = self._worker.vllm_config.model_config.dtype
        eye = torch.eye(width, dtype=dtype)
        columns = [
            layer.cpu_linear(eye[start : start + EYE_ROWS], layer.weight, None)
            for start in range(0, width, EYE_ROWS)
        ]
        return torch.cat(columns).t()

    def _configured(self) -> Any:
        return _vllm("vllm.config").set_current_vllm_config(self._worker.vllm_config)


class KeyRequired:
    """Answers nothing without the key; vLLM's `--api-key` leaves out what changes the server."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._wanted = f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                if scope["type"] == "http":
                    head = {"type": "http.response.start", "status": 401, "headers": []}
                    await send(head)
                    await send({"type": "http.response.body", "body": b"a key is needed"})
                return
        await self._app(scope, receive, send)


def paceline(part: str) -> Any:
    """A module of the Paceline that this file belongs to, without its folder on `sys.path`: there
    may be other versions of everything beside it."""
    if "paceline" not in sys.modules:
        root = Path(__file__).resolve().parents[2]
        spec = importlib.util.spec_from_file_location(
            "paceline", root / "__init__.py", submodule_search_locations=[str(root)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["paceline"] = module
        spec.loader.exec_module(module)
    return importlib.import_module(f"paceline.{part}")


def _vllm(module: str) -> Any:
    """By name: it is not there where Paceline's own types are checked."""
    return importlib.import_module(module)


def _tensor_parallel() -> tuple[int, int]:
    """Rank of this device among those of the server, and their number."""
    state = _vllm("vllm.distributed.parallel_state")
    return state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()


def _pack(layer: Any, *, remove_weight: bool) -> None:
    utils = _vllm("vllm.model_executor.layers.utils")
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=remove_weight)


def _is_embedding(layer: Any) -> bool:
    return hasattr(layer, "org_vocab_size") and getattr(layer, "weight", None) is not None


def _files_of(folder: Path) -> dict[str, str]:
    """Name of each tensor -> the file that it is in."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found: dict[str, str] = index["weight_map"]
    return found
