"""What records a run: files, trackers, and the live view."""

from __future__ import annotations

from paceline.config import RunFile
from paceline.observe.console import make_progress
from paceline.observe.ledger import Ledger
from paceline.observe.recorder import Recorder
from paceline.observe.samples import SampleWriter
from paceline.observe.sinks import make_trackers


def make_recorder(run_file: RunFile, total_steps: int) -> Recorder:
    """The recorder of a run's folder. `total_steps` is for the live view's time left."""
    folder, config = run_file.run_dir, run_file.observe
    samples = None
    if config.samples == "all":
        samples = SampleWriter(folder / "samples", config.max_samples_per_step)
    return Recorder(
        folder,
        leader=run_file.leader,
        trackers=make_trackers(config, folder),
        progress=make_progress(config.console, num_steps=total_steps, leader=run_file.leader),
        samples=samples,
        ledger=Ledger(folder),
        has_several=bool(run_file.policies),
    )
