"""Whole runs with a critic: what they leave, what they refuse to go on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from recorded_runs import train_run
from tiny import tiny_model

from paceline.checkpoint import CheckpointStore, PolicyProgress
from paceline.checkpoint_settings import CheckpointConfig
from paceline.errors import ConfigError, ResumeMismatchError

PPO = ("algorithm.kind=ppo", "critic.lr=0.02", "critic.warmup_steps=2")


def state_of(run_dir: Path, step: int) -> Any:
    return CheckpointStore(run_dir / "checkpoints", CheckpointConfig()).at(step).state()


def tensors(run_dir: Path, step: int, name: str) -> dict[str, torch.Tensor]:
    folder = run_dir / f"checkpoints/step-{step:06d}/policies/policy"
    return safetensors.torch.load_file(folder / name)


def rows(run_dir: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith(("time/", "perf/"))} for r in found]


def test_the_critic_learns_from_the_first_step_and_the_policy_after_the_warm_up(tmp_path: Path):
    run_dir = train_run(tmp_path, *PPO)
    policies = [tensors(run_dir, step, "model/model.safetensors") for step in (1, 2, 3)]
    start = safetensors.torch.load_file(tmp_path / "model/model.safetensors")
    for name, tensor in start.items():
        assert torch.equal(policies[0][name], tensor)
        assert torch.equal(policies[1][name], tensor)
    assert any(not torch.equal(policies[2][name], tensor) for name, tensor in start.items())

    heads = [tensors(run_dir, step, "critic/model/value_head.safetensors") for step in (1, 2)]
    bodies = [tensors(run_dir, step, "critic/model/model.safetensors") for step in (1, 2)]
    assert heads[0]["weight"].any()
    # A head of zeros has no gradient for the body: it learns from the second step on.
    assert torch.equal(bodies[0]["norm.weight"], start["model.norm.weight"])
    assert not torch.equal(bodies[1]["norm.weight"], start["model.norm.weight"])

    assert state_of(run_dir, 2).policies == {"policy": PolicyProgress(2, 0, critic_version=2)}
    assert state_of(run_dir, 3).policies == {"policy": PolicyProgress(3, 1, critic_version=3)}
    assert [row["version"] for row in rows(run_dir)] == [0, 0, 1]
    assert [("train/loss" in row, "critic/loss" in row) for row in rows(run_dir)] == [
        (False, True),
        (False, True),
        (True, True),
    ]


def test_turns_on_one_device_change_no_number(tmp_path: Path) -> None:
    plain = train_run(tmp_path, *PPO, "trainer.epochs_per_step=2")
    turns = train_run(
        tmp_path,
        *PPO,
        "trainer.epochs_per_step=2",
        "run.name=turns",
        "memory.order=host",
        "engine.weights=copy",
    )
    assert rows(turns) == rows(plain)


def test_a_critic_may_start_from_one_that_was_saved(tmp_path: Path) -> None:
    first = train_run(tmp_path, *PPO)
    saved = first / "checkpoints/step-000003/policies/policy/critic/model"
    second = train_run(
        tmp_path, *PPO, "run.name=second", f"critic.model.path={saved}", "critic.lr=0"
    )
    head = safetensors.torch.load_file(saved / "value_head.safetensors")
    again = tensors(second, 3, "critic/model/value_head.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in head.items())


def test_another_critic_is_refused_and_named(tmp_path: Path) -> None:
    train_run(tmp_path, *PPO)
    tiny_model(layers=1).save_pretrained(tmp_path / "other")
    with pytest.raises(ResumeMismatchError, match=r"critic\.path: saved 'model', now 'other'"):
        train_run(tmp_path, *PPO, "run.num_steps=4", "critic.model.path=other")


def test_the_settings_of_the_critics_learning_may_change(tmp_path: Path) -> None:
    train_run(tmp_path, *PPO)
    run_dir = train_run(tmp_path, *PPO, "run.num_steps=4", "critic.lr=0.001")
    assert rows(run_dir)[-1]["critic/lr"] == 0.001


def test_a_critic_of_a_smaller_vocabulary_is_refused(tmp_path: Path) -> None:
    tiny_model(vocab=40).save_pretrained(tmp_path / "small")
    with pytest.raises(ConfigError, match=r"critic\.model\.path = .*small'.*knows 40 tokens"):
        train_run(tmp_path, *PPO, "critic.model.path=small")
