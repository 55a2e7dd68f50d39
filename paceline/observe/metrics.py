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

    def merge(self, other: Metric) -> Metric:
        if self.kind != other.kind:
            raise ValueError(f"a {self.kind} can not be merged with a {other.kind}")
        match self.kind:
            case "mean":
                return Metric("mean", self.total + other.total, self.weight + other.weight)
            case "sum":
                return Metric("sum", self.total + other.total)
            case "max":
                return Metric("max", max(self.total, other.total))
            case "min":
                return Metric("min", min(self.total, other.total))

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
        self._metrics: dict[str, Metric] = {}

    def add(self, name: str, metric: Metric) -> None:
        known = self._metrics.get(name)
        self._metrics[name] = metric if known is None else known.merge(metric)

    def mean(self, name: str, total: float, weight: float = 1.0) -> None:
        """Add a sum of `weight` values; the metric is the mean over all that was added."""
        self.add(name, Metric("mean", float(total), float(weight)))

    def mean_of(self, name: str, values: Iterable[float]) -> None:
        items = list(values)
        self.mean(name, sum(items), len(items))

    def sum(self, name: str, value: float) -> None:
        self.add(name, Metric("sum", float(value)))

    def max(self, name: str, value: float) -> None:
        self.add(name, Metric("max", float(value)))

    def min(self, name: str, value: float) -> None:
        self.add(name, Metric("min", float(value)))

    def merge(self, other: Metrics) -> None:
        for name, metric in other._metrics.items():
            self.add(name, metric)

    def values(self) -> dict[str, float]:
        """Final numbers, in the order of the names; a mean over nothing is left out."""
        found = ((name, self._metrics[name].value) for name in sorted(self._metrics))
        return {name: value for name, value in found if value is not None}

    def state(self) -> dict[str, list[Any]]:
        """The partial results as JSON: name -> [kind, total, weight]; exact both ways."""
        return {n: [m.kind, m.total, m.weight] for n, m in sorted(self._metrics.items())}

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
        return self._metrics[name]
