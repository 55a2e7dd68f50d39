"""Values that a run could only fail by later, or would misread."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_files import VALID, write_project

from paceline.config import load_run_file
from paceline.errors import ConfigError
from paceline.explain import explain


@pytest.mark.parametrize(
    ("override", "pattern"),
    [
        ("trainer.lr=inf", r"trainer\.lr "),
        ("trainer.lr=nan", r"trainer\.lr "),
        ("trainer.weight_decay=inf", r"trainer\.weight_decay "),
        ("trainer.eps=inf", r"trainer\.eps "),
        ("trainer.betas=[0.9, 1.0]", r"trainer\.betas"),
        ("trainer.betas=[nan, 0.9]", r"trainer\.betas"),
        ("rollout.sampling.temperature=inf", r"rollout\.sampling\.temperature "),
        ("rollout.sampling.repetition_penalty=inf", r"rollout\.sampling\.repetition_penalty "),
        ('rollout.sampling.stop=[""]', r"rollout\.sampling\.stop\[0\]"),
        ("rollout.sampling.stop_token_ids=[-1]", r"rollout\.sampling\.stop_token_ids\[0\]"),
        ("run.base=nowhere", r"run\.base .*nowhere is not there"),
        ("run.base=prompts.jsonl", r"run\.base .*is a file, not a folder"),
        ("rollout.env=x", r'rollout\.env .*found \'x\', allowed: "single_turn", "file\.py:name"'),
        ("rollout.env=''", r"rollout\.env .*found ''"),
        ("rollout.env=envs.py:f", r"rollout\.env .*envs\.py is not there"),
        ("checkpoint.save_request_file=metrics.jsonl", "the run itself keeps 'metrics.jsonl'"),
        ("checkpoint.save_request_file=metrics.jsonl.old", "the run itself keeps"),
        ("checkpoint.save_request_file=./events.jsonl", "the run itself keeps 'events.jsonl'"),
        ("checkpoint.save_request_file=run.toml", "the run itself keeps 'run.toml'"),
        ("checkpoint.save_request_file=environment.json", "the run itself keeps"),
        ("checkpoint.save_request_file=checkpoints", "the run itself keeps 'checkpoints'"),
        ("checkpoint.save_request_file=checkpoints/save", "the run itself keeps 'checkpoints'"),
        ("checkpoint.save_request_file=samples", "the run itself keeps 'samples'"),
        ("checkpoint.save_request_file=../save", "allowed: a path inside the run's folder"),
        ("checkpoint.save_request_file=/tmp/save", "allowed: a path inside the run's folder"),
        ("checkpoint.save_request_file=.", "allowed: a path inside the run's folder"),
    ],
)
def test_refused(tmp_path: Path, override: str, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        load_run_file(write_project(tmp_path), [override])


@pytest.mark.parametrize(
    "override",
    [
        "trainer.max_grad_norm=inf",
        "checkpoint.save_request_file=save-now",
        "rollout.env=envs:function",
        "run.base=.",
    ],
)
def test_taken(tmp_path: Path, override: str) -> None:
    load_run_file(write_project(tmp_path), [override])


@pytest.mark.parametrize("key", ["lr", "weight_decay", "min_lr_ratio"])
def test_a_critic_learns_with_finite_numbers_only(tmp_path: Path, key: str) -> None:
    path = write_project(tmp_path, VALID + '[algorithm]\nkind = "ppo"\n')
    with pytest.raises(ConfigError, match=rf"critic\.{key} "):
        load_run_file(path, [f"critic.{key}=inf"])


def test_lists_of_limited_values_are_put_in_words() -> None:
    assert "list of texts, not empty" in explain("rollout.sampling.stop")
    assert "list of whole numbers >= 0" in explain("rollout.sampling.stop_token_ids")
