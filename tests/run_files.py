"""A small valid run file with everything it names, for tests."""

from __future__ import annotations

from pathlib import Path

VALID = """\
[run]
name = "demo"
num_steps = 3
[model]
path = "org/model"
[data]
path = "prompts.jsonl"
[reward]
kind = "exact"
"""


def write_project(folder: Path, text: str = VALID, name: str = "run.toml") -> Path:
    """A folder with prompts, a reward file and a run file; returns the run file."""
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (folder / "rewards.py").write_text("def score(completion):\n    return len(completion)\n")
    path = folder / name
    path.write_text(text)
    return path
