"""Partial metrics of micro-batches, kept on the device and read once an optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.observe.metrics import Metrics

if TYPE_CHECKING:
    from torch import Tensor


class Tally:
    """Sums, weights and maxima as tensors; `metrics` turns all of them into numbers at once."""

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def part(self, name: str, value: Tensor) -> None:
        """A share of a number of the whole step, such as the loss: shares are added up."""
        known = self._parts.get(name)
        self._parts[name] = value.double() if known is None else known + value.double()

    def mean(self, name: str, total: Tensor, weight: Tensor) -> None:
        """A sum of values and of their weights; the metric is the mean over all that was added."""
        pair = torch.stack([total.double(), weight.double()])
        known = self._sums.get(name)
        self._sums[name] = pair if known is None else known + pair

    def max(self, name: str, value: Tensor) -> None:
        known = self._maxima.get(name)
        self._maxima[name] = value.double() if known is None else known.maximum(value.double())

    def metrics(self, area: str, *, weight: float = 1.0) -> Metrics:
        """All of them under `area/name`. A part becomes the mean over optimizer steps.

        weight: of the parts; 0 where another process counts the step.
        """
        columns = [*self._parts.values(), *self._sums.values(), *self._maxima.values()]
        numbers = iter(torch.cat([c.reshape(-1) for c in columns]).tolist() if columns else [])
        metrics = Metrics()
        for name in self._parts:
            metrics.mean(f"{area}/{name}", next(numbers), weight)
        for name in self._sums:
            metrics.mean(f"{area}/{name}", next(numbers), next(numbers))
        for name in self._maxima:
            metrics.max(f"{area}/{name}", next(numbers))
        return metrics
