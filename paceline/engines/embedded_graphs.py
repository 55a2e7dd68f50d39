"""Decode steps captured as CUDA graphs: one launch a step instead of one for each kernel.

A small model's step is a few hundred short kernels, and launching them takes longer than running
them. A graph is captured for a number of rows and of positions read, both rounded up, when a step
of that size is made for the second time. Rows that are only there to fill up write position 0 of
free slots, which every new sequence overwrites.

Shape legend: N rows rounded up, n rows, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.engines.embedded_cache import BLOCK_TOKENS
from paceline.engines.embedded_sampler import IntArray

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, int], Tensor]
"""(token, position and slot index [3, N]; positions read) -> logits [N, V]. Static shapes."""
Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]

ROW_STEP = 64
"""Above this many rows they are rounded up to a multiple of it; below, to a power of two."""


def rounded_rows(num_rows: int, most: int) -> int:
    """Rows of the graph for a step of `num_rows`, `most` at most."""
    if num_rows > ROW_STEP:
        return min(most, -(-num_rows // ROW_STEP) * ROW_STEP)
    return min(most, 1 << (num_rows - 1).bit_length())


@dataclass(slots=True)
class _Graph:
    replay: Replay
    inputs_3N: Tensor
    logits_NV: Tensor


class DecodeGraphs:
    """Runs decode steps, from graphs where it has them."""

    def __init__(
        self,
        forward: Forward,
        device: torch.device,
        max_rows: int,
        make_capture: Callable[[], Capture] | None = None,
    ) -> None:
        """make_capture: for tests; default: CUDA graphs in a memory pool that they share."""
        self._forward = forward
        self._device = device
        self._max_rows = max_rows
        self._make_capture = make_capture or CudaCapture
        self._capture = self._make_capture()
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._seen: set[tuple[int, int]] = set()
        self._logits_NV: Tensor | None = None
        self._signature: object = None
        self.is_broken = False
        """The steps of this model can not be captured, and run without."""

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def drop(self) -> None:
        """Free the graphs; those that are needed are captured anew."""
        self._graphs.clear()
        # A memory pool ends with the last graph in it, and can not be used again.
        self._capture = self._make_capture()
        self._seen.clear()
        self._logits_NV = None

    def check(self, signature: object) -> None:
        """Drop the graphs if what they read has moved: caches or weights at other addresses."""
        if signature != self._signature:
            self.drop()
            self._signature = signature

    def step(self, inputs_3n: IntArray, longest: int, capacity: int) -> Tensor:
        """Logits [n, V]; valid until the next step. capacity: positions that a slot holds."""
        num_rows = inputs_3n.shape[1]
        rows = rounded_rows(num_rows, self._max_rows)
        length = min(capacity, -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS)
        key = rows, length
        graph = self._graphs.get(key)
        if graph is not None:
            graph.inputs_3N.copy_(self._filled(inputs_3n, rows, capacity))
            graph.replay()
            return graph.logits_NV[:num_rows]
        inputs_3N = self._filled(inputs_3n, rows, capacity).to(self._device)
        if key not in self._seen or self.is_broken:
            self._seen.add(key)
            return self._forward(inputs_3N, length)[:num_rows]
        logits_NV = self._forward(inputs_3N, length)
        self._record(key, inputs_3N, logits_NV)
        return logits_NV[:num_rows]

    def _filled(self, inputs_3n: IntArray, rows: int, capacity: int) -> Tensor:
        num_rows = inputs_3n.shape[1]
        filled = np.zeros((3, rows), np.int64)
        filled[:, :num_rows] = inputs_3n
        filled[2, num_rows:] = np.arange(num_rows, rows) * capacity
        return torch.from_numpy(filled)

    def _record(self, key: tuple[int, int], inputs_3N: Tensor, logits_NV: Tensor) -> None:
        rows, length = key
        if self._logits_NV is None:
            self._logits_NV = logits_NV.new_zeros(self._max_rows, logits_NV.shape[1])
        target_NV = self._logits_NV[:rows]

        def work() -> None:
            target_NV.copy_(self._forward(inputs_3N, length))

        try:
            replay = self._capture(work)
        except RuntimeError as error:
            self.is_broken = True
            logger.warning(
                "decode steps can not be captured as CUDA graphs, and run without them: %s", error
            )
            return
        self._graphs[key] = _Graph(replay, inputs_3N, target_NV)


class CudaCapture:
    """Captures work as a CUDA graph."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, work: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        # thread_local: the trainer's thread may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph.replay
