"""Whole runs whose trainer is in processes of its own, by a change of keys alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.sglang_real import sglang_options
from recorded_runs import train_run
from safetensors.torch import load_file

from paceline.build.replay import replay

FSDP = ("trainer.kind=fsdp", "trainer.ranks=2", "weight_check.when=always")

TWO = """
[policies.policy]
[policies.other]
model.path = "model"
"""


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def weights(run_dir: Path, step: int, part: str = "model") -> dict[str, torch.Tensor]:
    folder = run_dir / f"checkpoints/step-{step:06d}/policies/policy"
    return load_file(folder / part / "model.safetensors")


def assert_alike(one: Path, other: Path, part: str = "model") -> None:
    """The same tokens were sampled in every step; weights differ by rounding alone."""
    for left, right in zip(rows(one), rows(other), strict=True):
        assert left["rollout/sampled_tokens"] == right["rollout/sampled_tokens"]
        assert left["rollout/reward"] == right["rollout/reward"]
        for name in ("train/loss", "train/grad_norm", "train/entropy"):
            assert left.get(name, 0.0) == pytest.approx(right.get(name, 0.0), rel=1e-4, abs=1e-6)
    for step in (1, 2, 3):
        left, right = weights(one, step, part), weights(other, step, part)
        assert left.keys() == right.keys()
        for name, tensor in left.items():
            torch.testing.assert_close(tensor, right[name], rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("algorithm.kind=ppo", "critic.lr=1e-3", "critic.warmup_steps=1"),
        ("algorithm.kl_coef=0.1", "trainer.updates_per_step=3", "model.random_init=true"),
    ],
    ids=["grpo", "critic", "reference"],
)
def test_a_sharded_trainer_makes_the_run_that_one_process_makes(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    whole = train_run(tmp_path, *options, "run.name=whole", "engine.weights=copy")
    sharded = train_run(tmp_path, *options, *FSDP, "run.name=sharded")
    assert_alike(whole, sharded)
    if "algorithm.kind=ppo" in options:
        assert_alike(whole, sharded, "critic/model")
    # Replay needs no other process: it goes on from what the ranks saved.
    found = replay(sharded, 2)
    assert not [d for d in found.differences if d.part != "log-prob"], found.differences[:3]


@pytest.mark.slow
def test_it_goes_on_where_it_was_with_other_ranks_and_other_trainers(tmp_path: Path) -> None:
    whole = train_run(tmp_path, "run.name=whole", "engine.weights=copy")
    for stop, *options in (
        ("1", *FSDP),
        ("1", *FSDP, "trainer.ranks=1"),
        ("1", "trainer.kind=single", "engine.weights=copy"),
    ):
        parts = train_run(tmp_path, "run.name=parts", f"run.debug_exit_after={stop}", *options)
    assert_alike(whole, parts)


@pytest.mark.slow
def test_a_run_of_two_policies_one_of_them_sharded(tmp_path: Path) -> None:
    text = Path(__file__).parents[1].joinpath("recorded_runs.py").read_text()
    text = text.split('RUN_FILE = """')[1].split('"""')[0] + TWO
    env = "async def play(prompt, actors):\n"
    env += "    return {role: float(len((await a(prompt)).text)) for role, a in actors.items()}\n"
    (tmp_path / "env.py").write_text(env)
    run_dir = train_run(
        tmp_path,
        "rollout.env=env.py:play",
        "policies.policy.trainer.kind=fsdp",
        "policies.policy.trainer.ranks=2",
        "weight_check.when=always",
        "schedule.max_staleness=1",
        text=text.replace('[reward]\nkind = "regex"\npattern = "[0-4]"\n', ""),
    )
    found = rows(run_dir)
    assert {row["policy"] for row in found} == {"policy", "other"}
    assert max(row["version"] for row in found if row["policy"] == "policy") == 3


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.xdist_group("sglang")
def test_a_sharded_trainer_and_sglang_servers(tmp_path: Path) -> None:
    """The whole of it: ranks train, a real server samples, weights travel and are compared."""
    run_dir = train_run(tmp_path, *FSDP, *sglang_options())
    found = rows(run_dir)
    assert [row["version"] for row in found] == [1, 2, 3]
    # In float32 the server and the trainer say the same of the tokens that the server sampled.
    assert max(row["train/mismatch_max"] for row in found) < 1e-4
    assert min(row["rollout/sampled_tokens"] for row in found) > 12
