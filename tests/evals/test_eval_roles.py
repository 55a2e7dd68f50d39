"""Evals of environments with several roles: numbers of one policy, and of each role."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from batches import make_group, make_sample

from paceline.evals.run import EvalResult, PreparedSet, run_eval
from paceline.evals_settings import EvalSet
from paceline.observe.catalogue import describe
from paceline.types import Draw, Group, Prompt, Status


class Games:
    """Of each prompt two games; the second of the last prompt fails."""

    async def collect(self, draws: Sequence[Draw], *, step: int) -> list[Group]:
        return [self._group(draw, is_last=draw is draws[-1]) for draw in draws]

    def _group(self, draw: Draw, *, is_last: bool) -> Group:
        won = float(draw.ordinal)
        samples = [
            [
                make_sample(won, policy="big", role="solver", episode=i),
                make_sample(1 - won, policy="small", role="verifier", episode=i),
            ]
            for i in range(2)
        ]
        if is_last:
            samples[1][1].status, samples[1][1].reward = Status.UNSCORED, None
            samples[1][1].cause = "env/none"
        group = make_group(samples, draw.prompt.id)
        for episode in group.episodes:
            episode.others = [make_sample(0.25, policy="x@step-3", role="rival")]
        return group


def measure(policy: str | None) -> EvalResult:
    block = {"name": "games", "data": {"path": "x.jsonl"}, "samples_per_prompt": 2}
    settings = EvalSet.model_validate(block | ({} if policy is None else {"policy": policy}))
    prompts = [Prompt(id=f"p{i}", text="?") for i in range(3)]
    prepared = PreparedSet(settings, prompts, Games())
    return asyncio.run(run_eval(prepared, policy="big", step=3, version=3, timeout_s=60))


def test_the_leaders_rewards_count_unless_another_policy_is_named() -> None:
    leader, named = measure(None), measure("small")
    assert leader.reward is not None
    assert named.reward is not None
    assert leader.reward.value == pytest.approx(1.0)  # (0 + 1 + 2) / 3
    assert named.reward.value == pytest.approx(0.0)  # (1 + 0 - 1) / 3
    assert leader.num_samples == named.num_samples == 5
    assert leader.failures == {"env/none": 1}


def test_each_role_has_its_mean_reward() -> None:
    values = measure(None).metrics().values()
    roles = {name: value for name, value in values.items() if "/role/" in name}
    assert roles == {
        "eval/games/role/rival/reward": pytest.approx(0.25),
        "eval/games/role/solver/reward": pytest.approx(1.0),
        "eval/games/role/verifier/reward": pytest.approx(0.0),
    }
    assert all(describe(name) is not None for name in values)
