"""Trackers: TensorBoard and Weights & Biases, as extras that can fail without stopping a run."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import MissingExtraError
from paceline.observe.settings import ObserveConfig

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes the rows of a run. Each policy has a step axis of its own."""

    def start(self, steps: Mapping[str, int]) -> None:
        """Rows after these steps are void; policies that are not named have none."""

    def write(self, policy: str, step: int, values: Mapping[str, float]) -> None:
        """One row: all numbers of one step of one policy."""

    def close(self) -> None: ...


class Tolerant:
    """Passes everything on; warns at the first failure and goes on."""

    def __init__(self, name: str, sink: Sink) -> None:
        self._name = name
        self._sink = sink
        self._has_warned = False

    def start(self, steps: Mapping[str, int]) -> None:
        self._attempt(lambda: self._sink.start(steps))

    def write(self, policy: str, step: int, values: Mapping[str, float]) -> None:
        self._attempt(lambda: self._sink.write(policy, step, values))

    def close(self) -> None:
        self._attempt(self._sink.close)

    def _attempt(self, action: Callable[[], None]) -> None:
        # Whatever a tracker raises is no reason to lose a run: metrics.jsonl has every number.
        try:
            action()
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s failed (%s: %s); the run goes on, metrics.jsonl has every number",
                    self._name,
                    type(error).__name__,
                    error,
                )


class TensorBoardSink:
    """Writes `<folder>/<policy>/`: one TensorBoard run a policy, scalars in double precision."""

    def __init__(self, folder: Path) -> None:
        try:
            self._writers = importlib.import_module("tensorboard.summary.writer.event_file_writer")
            self._event = importlib.import_module("tensorboard.compat.proto.event_pb2")
            self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2")
            self._tensor = importlib.import_module("tensorboard.compat.proto.tensor_pb2")
        except ImportError as error:
            raise MissingExtraError("observe.tensorboard", "tensorboard", "tensorboard") from error
        self._folder = folder
        self._open: dict[str, Any] = {}

    def start(self, steps: Mapping[str, int]) -> None:
        left = {path.name: -1 for path in self._folder.glob("*") if path.is_dir()}
        for policy, step in {**left, **steps}.items():
            self._writer(policy, step)

    def write(self, policy: str, step: int, values: Mapping[str, float]) -> None:
        metadata = self._summary.SummaryMetadata(
            plugin_data=self._summary.SummaryMetadata.PluginData(plugin_name="scalars"),
            data_class=self._summary.DATA_CLASS_SCALAR,
        )
        items = [
            self._summary.Summary.Value(
                tag=name,
                metadata=metadata,
                tensor=self._tensor.TensorProto(dtype="DT_DOUBLE", double_val=[value]),
            )
            for name, value in values.items()
        ]
        writer = self._writer(policy)
        writer.add_event(
            self._event.Event(
                step=step, summary=self._summary.Summary(value=items), wall_time=time.time()
            )
        )
        writer.flush()

    def close(self) -> None:
        for writer in self._open.values():
            writer.close()

    def _writer(self, policy: str, last_step: int = -1) -> Any:
        """At a session start, TensorBoard forgets what older sessions wrote of later steps."""
        if policy not in self._open:
            writer = self._writers.EventFileWriter(str(self._folder / policy))
            session = self._event.SessionLog(status=self._event.SessionLog.START)
            writer.add_event(
                self._event.Event(step=last_step + 1, session_log=session, wall_time=time.time())
            )
            self._open[policy] = writer
        return self._open[policy]


class WandbSink:
    """One Weights & Biases run, resumed by the id in `<folder>/wandb-id`."""

    def __init__(self, folder: Path, project: str, name: str) -> None:
        try:
            self._wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise MissingExtraError("observe.wandb", "wandb", "wandb") from error
        self._folder = folder
        self._project = project
        self._name = name
        self._run: Any = None
        self._declared: set[str] = set()

    def start(self, steps: Mapping[str, int]) -> None:
        path = self._folder / "wandb-id"
        if not path.exists():
            path.write_text(self._wandb.util.generate_id())
        self._run = self._wandb.init(
            project=self._project,
            name=self._name,
            id=path.read_text().strip(),
            dir=str(self._folder),
            resume="allow",
        )

    def write(self, policy: str, step: int, values: Mapping[str, float]) -> None:
        if policy not in self._declared:
            self._declared.add(policy)
            self._run.define_metric(f"{policy}/step")
            self._run.define_metric(f"{policy}/*", step_metric=f"{policy}/step")
        row = {f"{policy}/{name}": value for name, value in values.items()}
        self._run.log({f"{policy}/step": step, **row})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def make_trackers(config: ObserveConfig, folder: Path) -> Sequence[Sink]:
    """The trackers that `[observe]` asks for; raises MissingExtraError before a run starts."""
    trackers: list[Sink] = []
    if config.tensorboard:
        trackers.append(Tolerant("TensorBoard", TensorBoardSink(folder / "tensorboard")))
    if config.wandb is not None:
        sink = WandbSink(folder, config.wandb, folder.resolve().name)
        trackers.append(Tolerant("Weights & Biases", sink))
    return trackers
