"""Checkpoints that survive a crash at any instant.

    checkpoints/step-000012/{policies/<name>/..., data.json, state.json, manifest.json}
                latest  best.json

    staging --trainers and JSON files--> commit --manifest, fsync, rename--> newest

A save is made in a folder of its own; the rename to `step-000012` is the commit. A restore reads
`state.json` first and tells each policy which step to expect.
"""

from paceline.checkpoint.content import Checkpoint, Found, Skipped, Staged, step_name
from paceline.checkpoint.retention import Best
from paceline.checkpoint.state import PolicyProgress, RunState, check_compatible
from paceline.checkpoint.store import CheckpointStore

__all__ = [
    "Best",
    "Checkpoint",
    "CheckpointStore",
    "Found",
    "PolicyProgress",
    "RunState",
    "Skipped",
    "Staged",
    "check_compatible",
    "step_name",
]
