"""A step as its run recorded it: run file, samples as groups, row of metrics, weights before it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint import Checkpoint, CheckpointStore, RunState, step_name
from paceline.checkpoint_settings import CheckpointConfig
from paceline.config import RunFile, load_run_file
from paceline.errors import CheckpointError, ConfigError, DataError
from paceline.observe.jsonl import read_rows
from paceline.observe.regroup import regroup
from paceline.observe.samples import (
    SampleRecord,
    find_samples,
    policy_folder,
    policy_names,
    read_samples,
    sample_files,
)
from paceline.trainers.threads import choose_threads
from paceline.types import Group, Sample


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """Everything that a run kept of one step."""

    run_dir: Path
    run_file: RunFile
    """As the policy sees it."""
    policy: str
    step: int
    """Of the policy's clock."""
    records: list[SampleRecord]
    """All of the file, those that were not trained on included."""
    groups: list[Group]
    """Those that were trained on, in the order of their draws."""
    row: dict[str, Any]
    """The step's row of `metrics.jsonl`; empty if there is none."""

    @property
    def trained_records(self) -> list[SampleRecord]:
        """One for each sample of `groups`, in their order."""
        return [r for r in self.records if r.dropped is None and r.learns]

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the step, if it had groups enough."""
        trainer = self.run_file.trainer
        return trainer.updates_per_step * trainer.epochs_per_step


def read_step(
    run_dir: Path,
    step: int | None = None,
    overrides: Sequence[str] = (),
    *,
    policy: str | None = None,
) -> RecordedStep:
    """What a run kept of a policy's step, by default of the last one. Nothing is changed on disk.

    overrides: keys set over the run file that the run left. policy: one of several; default: the
    leader. Raises ConfigError or DataError.
    """
    run_file = _run_file_of(run_dir, overrides)
    name = _choose(run_file, run_dir, policy)
    step, path = find_samples(samples_folder(run_dir, name), step)
    records = read_samples(path)
    rows = read_rows(run_dir / "metrics.jsonl")
    row = next((r for r in rows if r.get("step") == step and r.get("policy") == name), {})
    try:
        groups = regroup([record for record in records if record.dropped is None])
    except ValueError as error:
        raise DataError(f"{path} does not fit together: {error}") from error
    return RecordedStep(
        run_dir, run_file.view(name).in_one_process(), name, step, records, groups, row
    )


def _run_file_of(run_dir: Path, overrides: Sequence[str] = ()) -> RunFile:
    """The file that a run left. What it needs besides its models is looked for where needed."""
    if not (run_dir / "run.toml").is_file():
        raise ConfigError(f"{run_dir} has no run.toml: name the folder of a run, such as runs/demo")
    return load_run_file(run_dir / "run.toml", overrides, purpose="generate")


def _choose(run_file: RunFile, run_dir: Path, policy: str | None) -> str:
    name = run_file.leader if policy is None else policy
    if name not in run_file.learners:
        known = ", ".join(run_file.learners)
        raise ConfigError(f"{run_dir} trains no policy {name!r}; it trains {known}")
    return name


def samples_folder(run_dir: Path, policy: str | None = None) -> Path:
    """Where the samples of a policy lie, by default of the only one or the leader.

    Raises ConfigError if the run does not train it.
    """
    folder = run_dir / "samples"
    names = policy_names(folder)
    if not names and policy is None:
        return folder
    name = _choose(_run_file_of(run_dir), run_dir, policy)
    return policy_folder(folder, name) if names else folder


def checkpoint_after(recorded: RecordedStep) -> Checkpoint | None:
    """The verified checkpoint of a step; None if there is none, or it is damaged."""
    try:
        return _checkpoint_at(recorded, recorded.step)
    except CheckpointError:
        return None


def checkpoint_before(recorded: RecordedStep) -> Checkpoint | None:
    """The weights that a step began with; None stands for the model of the run file, at step 1.

    Raises DataError, with the steps that have what is needed, if they were not saved.
    """
    before = recorded.step - 1
    if before == 0:
        return None
    try:
        return _checkpoint_at(recorded, before)
    except CheckpointError as error:
        kept = sample_files(samples_folder(recorded.run_dir, recorded.policy))
        able = [s for s in (1, *(s + 1 for s in _saved(recorded))) if s in kept]
        steps = ", ".join(map(str, dict.fromkeys(able))) or "none"
        raise DataError(
            f"step {recorded.step} began with the weights of step {before}, and {error}. Steps "
            f"whose weights are there: {steps}. To keep those of every step, train with "
            "checkpoint.every=1 and a large checkpoint.keep_last"
        ) from error


def _checkpoint_at(recorded: RecordedStep, step: int) -> Checkpoint:
    """The one that holds the policy at this step of its own."""
    number = _saved(recorded).get(step) if recorded.run_file.policies else step
    if number is None:
        raise CheckpointError(f"no checkpoint holds policy {recorded.policy!r} at that step")
    return _store(recorded.run_dir).at(number)


def _saved(recorded: RecordedStep) -> dict[int, int]:
    """Step of the policy -> step of the checkpoint that holds it: a follower has its own count."""
    store = _store(recorded.run_dir)
    if not recorded.run_file.policies:
        return {step: step for step in store.steps()}
    found = {}
    for step in store.steps():
        path = store.root / step_name(step) / "state.json"
        try:
            state = RunState.from_json(json.loads(path.read_bytes()), str(path))
        except (OSError, ValueError, CheckpointError):
            continue  # it is damaged, and can not be what is looked for
        progress = state.policies.get(recorded.policy)
        if progress is not None:
            found[progress.step] = step
    return found


def check_complete(recorded: RecordedStep) -> None:
    """Raise DataError if the step can not be replayed from what was kept of it."""
    if not recorded.row:
        raise DataError(
            f"{recorded.run_dir / 'metrics.jsonl'} has no row of step {recorded.step}: the run "
            "ended in that step; start it again to finish it, or replay an earlier step"
        )
    num_samples = recorded.row.get("rollout/samples")
    num_kept = sum(record.learns for record in recorded.records)
    if num_samples is not None and num_kept < num_samples:
        raise DataError(
            f"{num_kept} of the {num_samples:g} samples of step {recorded.step} were kept "
            "(observe.max_samples_per_step), and its loss is made of all: train without that key"
        )
    if not recorded.groups:
        raise DataError(f"step {recorded.step} has no group that was trained on")


def trained_samples(groups: Sequence[Group]) -> list[Sample]:
    """The samples that become rows, in the order of the rows."""
    return [
        sample
        for group in groups
        for episode in group.episodes
        for sample in episode.samples
        if episode.is_trainable and any(sample.mask)
    ]


def recorded_threads(recorded: RecordedStep, checkpoint: Checkpoint | None) -> int:
    """CPU threads of the trainer at that time: sums depend on them in the last bit."""
    if recorded.run_file.trainer.threads is not None:
        return recorded.run_file.trainer.threads
    found = checkpoint.state().threads if checkpoint is not None else None
    if found is None:
        try:
            found = json.loads((recorded.run_dir / "environment.json").read_bytes())["threads"]
        except (OSError, ValueError, KeyError, TypeError):
            found = None
    return found if isinstance(found, int) and found > 0 else choose_threads()


def _store(run_dir: Path) -> CheckpointStore:
    return CheckpointStore(run_dir / "checkpoints", CheckpointConfig())
