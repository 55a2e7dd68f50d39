"""What every start of a run begins with: its folder, its newest checkpoint, its cadence."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import torch

from paceline.build.parts import Given, Text, load_prompts
from paceline.checkpoint import Checkpoint, CheckpointStore, RunState
from paceline.config import RunFile
from paceline.data.stream import PromptStream, steps_for_epochs
from paceline.drivers.dispose import Disposer
from paceline.drivers.run import Cadence
from paceline.errors import CheckpointError, ConfigError
from paceline.trainers.threads import choose_threads

logger = logging.getLogger(__name__)


def open_store(run_file: RunFile, disposer: Disposer) -> tuple[CheckpointStore, Checkpoint | None]:
    """The run's checkpoints, locked for this process, and the one to go on from."""
    store = CheckpointStore(run_file.run_dir / "checkpoints", run_file.checkpoint)
    if run_file.run.resume == "must" and not store.root.exists():
        raise ConfigError(
            f"run.resume is `must`, but there is no {store.root}: is run.name the one you meant?"
        )
    for note in store.prepare():
        logger.info("checkpoints: %s", note)
    disposer.add("checkpoint folder", store.close)
    return store, _checkpoint_to_resume(run_file, store)


def _checkpoint_to_resume(run_file: RunFile, store: CheckpointStore) -> Checkpoint | None:
    found = store.newest()
    for skipped in found.skipped:
        logger.warning("checkpoint %s is skipped: %s", skipped.folder.name, skipped.reason)
    mode = run_file.run.resume
    if found.checkpoint is None:
        if mode == "must":
            raise CheckpointError(
                f"run.resume is `must`, but {store.root} has no complete checkpoint"
            )
        if found.skipped:
            raise CheckpointError(
                f"{store.root} has checkpoints, but none is complete: {found.skipped[0].reason}. "
                "Move the folder away, or choose another run.name, to start anew"
            )
    elif mode == "never":
        raise ConfigError(
            f"run.resume is `never`, but {store.root} has a checkpoint of step "
            f"{found.checkpoint.step}: choose another run.name, or let it resume"
        )
    return found.checkpoint


def settle(disposer: Disposer) -> None:
    """Spare the garbage collector what lives as long as the run: modules, the model, the prompts.

    Looking through all of that again took a fifth of the steps of a small model.
    """
    gc.collect()
    gc.freeze()
    disposer.add("garbage collector", gc.unfreeze)


def set_threads(run_file: RunFile, state: RunState | None) -> int:
    """CPU threads of the process, engine and trainer alike. The choice of the first start is kept:
    sums depend on it in the last bit."""
    if run_file.trainer.threads is not None:
        threads, origin = run_file.trainer.threads, "trainer.threads"
    elif state is not None and state.threads:
        threads, origin = state.threads, "kept from the checkpoint"
    else:
        threads, origin = choose_threads(), "measured, or OMP_NUM_THREADS"
    logger.info("CPU threads of torch: %d (%s)", threads, origin)
    torch.set_num_threads(threads)
    return threads


def make_stream(run_file: RunFile, given: Given, text: Text) -> PromptStream:
    return PromptStream(
        load_prompts(run_file, given, text),
        seed=run_file.run.seed,
        shuffle=run_file.data.shuffle if run_file.data else True,
        num_epochs=run_file.run.num_epochs,
    )


def make_cadence(run_file: RunFile, stream: PromptStream, *, has_evals: bool) -> Cadence:
    run = run_file.run
    if run.num_steps is not None:
        num_steps = run.num_steps
    elif run.num_epochs is not None:
        per_step = run_file.rollout.prompts_per_step
        num_steps = steps_for_epochs(stream.num_prompts, run.num_epochs, per_step)
    else:
        raise ConfigError("run.num_steps or run.num_epochs is needed to train")
    every = run_file.evals.every if has_evals else None
    is_eval_only = num_steps == 0
    return Cadence(
        num_steps=num_steps,
        save_every=run_file.checkpoint.every,
        eval_every=every,
        eval_first=has_evals
        and (is_eval_only or (every is not None and run_file.evals.before_training)),
        counts_epochs=run.num_epochs is not None,
        debug_exit_after=run.debug_exit_after,
        publish_every=run_file.schedule.publish_every,
    )


def save_request_path(run_file: RunFile) -> Path | None:
    name = run_file.checkpoint.save_request_file
    return None if name is None else run_file.run_dir / name
