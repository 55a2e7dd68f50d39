"""The recorder of a run, with everything that `[observe]` asks for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.observe.console import make_progress
from paceline.observe.recorder import Recorder
from paceline.observe.samples import SampleWriter
from paceline.observe.settings import ObserveConfig
from paceline.observe.sinks import make_trackers


def open_recorder(
    folder: Path,
    config: ObserveConfig,
    *,
    total_steps: int,
    resume_step: int | Mapping[str, int] | None = None,
    pending: Mapping[str, Any] | None = None,
    leader: str = "policy",
) -> Recorder:
    """A recorder that has started; the caller closes it.

    `resume_step`: the step of the leader, or of each policy by name, that the checkpoint restored;
    None in a fresh run. `pending`: `RunState.metrics` of that checkpoint. Raises MissingExtraError
    if a tracker is asked for and not installed, PacelineError if the folder can not be written.
    """
    recorder = Recorder(
        folder,
        leader=leader,
        trackers=make_trackers(config, folder),
        progress=make_progress(config.console, num_steps=total_steps),
        samples=None
        if config.samples == "none"
        else SampleWriter(folder / "samples", config.max_samples_per_step),
    )
    steps = {leader: resume_step} if isinstance(resume_step, int) else dict(resume_step or {})
    try:
        recorder.start(steps, pending)
        recorder.event("start", steps=steps)
    except BaseException:
        recorder.close()
        raise
    return recorder
