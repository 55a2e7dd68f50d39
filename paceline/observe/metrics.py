"""Numbers with their mean: a metric carries its numerator and denominator until it is written.

Merging two partial results is exact, so micro-batches, ranks and groups of uneven size give the
same number as one pass over everything. Console, file and trackers all read `Metrics.values()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

Kind = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A partial result. For a mean, `total` is the weighted sum and `weight` the sum of weights."""

    kind: Kind
    total: float
    weight: float = 1.0

    @property
    def value(self) -> float | None:
        """None for a mean over nothing."""
        if self.kind != "mean":
            return self.total
        return self.total / self.weight if self.weight else None


class Metrics:
    """A set of named metrics. Names are `area/name`, such as `train/clip_fraction`.

    Example: `m = Metrics(); m.mean("rollout/reward", 3.0, weight=4)`, then
    `m.values() == {"rollout/reward": 0.75}`.
    """

    def __init__(self) -> None:
        # Kind, total and weight, changed in place: thousands of numbers are added in a step.
        self._metrics: dict[str, tuple[Kind, list[float]]] = {}

    def add(self, name: str, metric: Metric) -> None:
        self._add(name, metric.kind, metric.total, metric.weight)

    def _add(self, name: str, kind: Kind, total: float, weight: float = 1.0) -> None:
        known = self._metrics.get(name)
        if known is None:
            self._metrics[name] = (kind, [total, weight])
            return
        found, numbers = known
        if found != kind:
            raise ValueError(f"a {found} can not be merged with a {kind}")
        if kind == "mean":
            numbers[0] += total
            numbers[1] += weight
        elif kind == "sum":
            numbers[0] += total
        elif kind == "max":
            numbers[0] = max(numbers[0], total)
        else:
            numbers[0] = min(numbers[0], total)

    def mean(self, name: str, total: float, weight: float = 1.0) -> None:
        """Add a sum of `weight` values; the metric is the mean over all that was added."""
        self._add(name, "mean", float(total), float(weight))

    def mean_of(self, name: str, values: Iterable[float]) -> None:
        items = list(values)
        self.mean(name, sum(items), len(items))

    def sum(self, name: str, value: float) -> None:
        self._add(name, "sum", float(value))

    def max(self, name: str, value: float) -> None:
        self._add(name, "max", float(value))

    def min(self, name: str, value: float) -> None:
        self._add(name, "min", float(value))

    def merge(self, other: Metrics) -> None:
        for name, (kind, numbers) in other._metrics.items():
            self._add(name, kind, *numbers)

    def values(self) -> dict[str, float]:
        """Final numbers, in the order of the names; a mean over nothing is left out."""
        found = ((name, self[name].value) for name in sorted(self._metrics))
        return {name: value for name, value in found if value is not None}

    def state(self) -> dict[str, list[Any]]:
        """The partial results as JSON: name -> [kind, total, weight]; exact both ways."""
        return {name: [kind, *numbers] for name, (kind, numbers) in sorted(self._metrics.items())}

    @classmethod
    def from_state(cls, state: Mapping[str, Sequence[Any]]) -> Metrics:
        """What `state` gave out."""
        metrics = cls()
        for name, (kind, total, weight) in state.items():
            metrics.add(name, Metric(cast(Kind, kind), float(total), float(weight)))
        return metrics

    def __contains__(self, name: str) -> bool:
        return name in self._metrics

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __getitem__(self, name: str) -> Metric:
        kind, numbers = self._metrics[name]
        return Metric(kind, *numbers)
