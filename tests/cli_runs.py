"""Commands called in this process, and checkpoints for them."""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoint import CheckpointStore, PolicyProgress, RunState
from paceline.checkpoint_settings import CheckpointConfig
from paceline.cli import main


def run(*words: str | Path) -> int:
    """The exit code of a command."""
    try:
        return main([str(word) for word in words])
    except SystemExit as end:
        return int(end.code or 0)


def make_checkpoint(run_dir: Path, step: int, score: float | None = None) -> Path:
    """A committed checkpoint with a small model folder; returns its folder."""
    config = CheckpointConfig.model_construct(
        **{**CheckpointConfig().model_dump(), "best_metric": "train/loss", "keep_last": 9}
    )
    store = CheckpointStore(run_dir / "checkpoints", config)
    store.prepare()
    with store.staging(step) as staged:
        model = staged.policy_folder("policy") / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        (model / "weights").write_text(f"of step {step}")
        progress = {"policy": PolicyProgress(step, step)}
        staged.write_state(
            RunState(
                step=step, leader="policy", policies=progress, seed=0, fingerprint={}, metrics={}
            )
        )
        folder = store.commit(staged).folder
    if score is not None:
        store.record(step, {"train/loss": score})
    store.close()
    return folder


EVALS = '[[evals.sets]]\nname = "held"\ndata = { path = "prompts.jsonl" }\n'
