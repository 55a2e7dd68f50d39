"""Running baselines go from one step to the next, and through a checkpoint."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from batches import make_group, make_sample

from paceline.algorithms.rloo import Rloo
from paceline.build.policies import restore_policy
from paceline.checkpoint import PolicyProgress, RunState
from paceline.policy import Policy
from paceline.testing import FakeEngine, FakeTrainer
from paceline.types import Group

ODD = 0.1 + 0.2


def make_policy() -> Policy:
    algorithm = Rloo(baseline="running")
    return Policy("policy", algorithm, FakeEngine(), FakeTrainer(), "shared", version=0)


def game(solver: float, verifier: float) -> list[Group]:
    roles = {"solver": solver, "verifier": verifier}
    return [make_group([[make_sample(reward, role=role) for role, reward in roles.items()]])]


def learn(policy: Policy, groups: list[Group]) -> list[float]:
    credit, _ = asyncio.run(policy.learn(groups))
    return [column[-1] for column in credit.advantages]


def test_each_step_is_compared_with_those_before() -> None:
    policy = make_policy()
    assert learn(policy, game(1.0, 0.5)) == [0.0, 0.0]
    assert learn(policy, game(0.5, 0.5)) == [-0.5, 0.0]
    assert learn(policy, game(0.0, 1.5)) == [-0.75, 1.0]


def test_a_policy_without_them_has_no_state() -> None:
    policy = make_policy()
    policy.algorithm = Rloo()
    learn(policy, game(1.0, 0.5))
    assert policy.baselines == {}


@pytest.mark.parametrize("is_old", [False, True])
def test_they_are_as_they_were_after_a_restore(tmp_path: Path, is_old: bool) -> None:
    policy = make_policy()
    learn(policy, game(ODD, 1 / 3))
    folder = tmp_path / "policies" / "policy"
    asyncio.run(policy.trainer.save(folder))
    saved = {role: [mean, count] for role, (mean, count) in policy.baselines.items()}
    progress = PolicyProgress(1, policy.trainer.version, None, saved)
    document: Any = RunState(1, "policy", {"policy": progress}, seed=0).to_json()
    if is_old:
        del document["policies"]["policy"]["baselines"]
    state = RunState.from_json(json.loads(json.dumps(document)))
    checkpoint: Any = SimpleNamespace(folder=tmp_path, policy_folder=lambda name: folder)
    restored = make_policy()
    asyncio.run(restore_policy(restored, checkpoint, state))
    assert restored.baselines == ({} if is_old else policy.baselines)
    assert all(isinstance(count, int) for _, count in restored.baselines.values())
