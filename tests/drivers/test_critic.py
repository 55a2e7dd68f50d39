"""A critic in a run: it learns before the actor, alone in its warm-up, and is saved with it."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from drivers.fake_run import Log, drive, make_group, make_run, rows

from paceline.algorithms import ALGORITHMS
from paceline.build.policies import restore_policy
from paceline.checkpoint import PolicyProgress
from paceline.drivers.memory import MemoryConfig, make_memory_plan
from paceline.errors import CheckpointError
from paceline.policy import Policy
from paceline.testing import FakeEngine, FakeTrainer, MemoryLedger
from paceline.types import Draw, Prompt, Row
from paceline.weights.base import WeightPlan

CRITIC = ["critic-forward_backward", "critic-optim_step"]
ACTOR = ["forward_backward", "optim_step"]
PUBLISH = ["pause finish", "send {0}", "receive {0}", "resume"]


def published(version: int) -> list[str]:
    return [entry.format(version) for entry in PUBLISH]


def test_values_then_the_critic_then_the_actor_then_one_save(tmp_path: Path) -> None:
    run, log = make_run(tmp_path, num_steps=1, save_every=1, eval_every=None, algorithm="ppo")
    drive(run)
    start = log.index("collect 1")
    assert log[start:] == [
        "collect 1",
        "critic-forward values",
        *CRITIC,
        *ACTOR,
        "begin-save",
        "save",
        "critic-save",
        "end-save",
        *published(1),
    ]


def test_every_update_of_the_critic_comes_before_the_first_of_the_actor(tmp_path: Path) -> None:
    run, log = make_run(
        tmp_path,
        num_steps=1,
        save_every="never",
        eval_every=None,
        algorithm="ppo",
        updates_per_step=2,
        epochs_per_step=3,
    )
    drive(run)
    start = log.index("collect 1")
    assert log[start:] == [
        "collect 1",
        "forward policy",
        "critic-forward values",
        *CRITIC * 6,
        *ACTOR * 6,
        *published(6),
    ]
    assert run.policy.critic is not None
    assert (run.policy.trainer.version, run.policy.critic.version) == (6, 6)


def test_in_warm_up_the_actor_stays_and_its_version_too(tmp_path: Path) -> None:
    run, log = make_run(
        tmp_path,
        num_steps=3,
        save_every=1,
        eval_every=1,
        algorithm="ppo",
        critic_only_steps=2,
        epochs_per_step=2,
    )
    drive(run)
    start, end = log.index("collect 1"), log.index("collect 2")
    assert log[start:end] == [
        "collect 1",
        "critic-forward values",
        *CRITIC * 2,
        "begin-save",
        "save",
        "critic-save",
        "end-save",
        *published(0),
        "eval 1 version 0",
    ]
    assert log.count("optim_step") == 2
    assert log.index("optim_step") > log.index("collect 3")
    assert [row["version"] for row in rows(tmp_path)] == [0, 0, 0, 2]
    assert run.policy.critic is not None
    assert (run.policy.trainer.version, run.policy.critic.version) == (2, 6)


def test_metrics_of_both_are_in_the_row(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, num_steps=2, algorithm="ppo", critic_only_steps=1)
    drive(run)
    _, warm_up, last = rows(tmp_path)
    assert warm_up["critic/lr"] == last["critic/lr"] == last["train/lr"] == 1.0
    assert warm_up["critic/grad_norm"] == 1.0
    assert warm_up["critic/skipped_updates"] == 0.0
    assert "train/lr" not in warm_up
    assert last["critic/loss"] == last["train/loss"]


@pytest.mark.parametrize("warm_up", [0, 3])
@pytest.mark.parametrize("stop_after", [1, 2, 3, 4])
def test_resume_continues_as_if_nothing_had_happened(
    tmp_path: Path, stop_after: int, warm_up: int
) -> None:
    settings = {"num_steps": 5, "save_every": 1, "algorithm": "ppo", "critic_only_steps": warm_up}
    whole, whole_log = make_run(tmp_path / "whole", **settings)
    drive(whole)
    part, part_log = make_run(tmp_path / "part", debug_exit_after=stop_after, **settings)
    drive(part)
    rest, rest_log = make_run(tmp_path / "part", **settings)
    drive(rest)
    verbs = ("collect", "eval", "optim_step", "critic-optim_step")
    resumed: Log = Log([*part_log.of(*verbs), *rest_log.of(*verbs)])
    assert resumed == whole_log.of(*verbs)
    for found, expected in (
        (rest.policy.trainer, whole.policy.trainer),
        (rest.policy.critic, whole.policy.critic),
    ):
        assert found.weight == expected.weight  # type: ignore[union-attr]
        assert found.version == expected.version  # type: ignore[union-attr]
    ignore = ("time/", "perf/")

    def kept(folder: Path) -> list[dict[str, float]]:
        return [{k: v for k, v in r.items() if not k.startswith(ignore)} for r in rows(folder)]

    assert kept(tmp_path / "part") == kept(tmp_path / "whole")


def test_the_state_holds_both_versions_and_a_missing_critic_is_refused(tmp_path: Path) -> None:
    settings = {"num_steps": 3, "save_every": 1, "algorithm": "ppo", "critic_only_steps": 1}
    run, _ = make_run(tmp_path, debug_exit_after=2, **settings)
    drive(run)
    state = run.store.at(2).state()
    assert state.policies == {"policy": PolicyProgress(2, 1, critic_version=2)}
    again, _ = make_run(tmp_path, **settings)
    shutil.rmtree(tmp_path / "checkpoints/step-000002/policies/policy/critic")
    found = again.store.at(1)
    shutil.rmtree(found.folder / "policies/policy/critic")
    with pytest.raises(CheckpointError, match="no critic of policy 'policy'"):
        found.critic_folder("policy")
    again.store.close()


def test_trainers_that_are_not_where_the_state_says_are_refused(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, num_steps=2, save_every=1, algorithm="ppo")
    run.policy.critic._version = 7  # type: ignore[union-attr]
    drive(run)
    file = tmp_path / "checkpoints/step-000002/policies/policy/critic/trainer.json"
    saved = json.loads(file.read_text())
    assert saved["version"] == 9
    again, _ = make_run(tmp_path, num_steps=3, save_every=1, algorithm="ppo")
    found = again.store.at(2)
    file.write_text(json.dumps({**saved, "version": 8}))

    async def load() -> None:
        await restore_policy(again.policy, found, found.state())

    with pytest.raises(CheckpointError, match=r"critic_version=9.*critic_version=8"):
        asyncio.run(load())
    again.store.close()


def one_step(order: str, epochs: int) -> MemoryLedger:
    """A step with a critic on one device; who held what."""
    ledger = MemoryLedger()
    engine = FakeEngine(ledger=ledger, sizes={"weights": 10, "kv_cache": 50, "graphs": 1})
    actor = FakeTrainer(ledger=ledger, size=40)
    critic = FakeTrainer(ledger=ledger, size=30, head="values", name="critic")
    policy = Policy(
        "policy",
        ALGORITHMS["ppo"](),
        engine,
        actor,
        "copy",
        epochs_per_step=epochs,
        critic=critic,
        takes_turns=True,
    )
    plan = make_memory_plan(MemoryConfig(order=order), engine, policy)

    async def step() -> None:
        await plan.before_learn()
        await policy.learn([make_group(Draw(0, 0, Prompt("p0", text="0")))])
        await plan.after_learn()
        await engine.receive(WeightPlan("policy", 1, "copy"))
        await plan.after_publish()

    asyncio.run(step())
    return ledger


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("order", ["host", "device"])
def test_actor_and_critic_are_never_on_the_device_together(order: str, epochs: int) -> None:
    """The critic leaves before the actor comes; both are gone before the caches come back."""
    ledger = one_step(order, epochs)
    assert ledger.device_peak == 61  # the engine alone; actor and critic would be 70
    assert ledger.device == {
        "engine.weights": 10,
        "engine.kv_cache": 50,
        "engine.graphs": 1,
        "trainer": 0,
        "critic": 0,
    }


def test_a_value_after_the_last_token_is_asked_for_where_the_algorithm_wants_it() -> None:
    asked: list[list[Row]] = []

    class Watching(FakeTrainer):
        async def forward(self, rows, head):
            asked.append(rows)
            return [float(i + 1) * row.mask_T for i, row in enumerate(rows)]

    group = make_group(Draw(0, 0, Prompt("p0", text="0")))
    for bootstrap in (False, True):
        algorithm = ALGORITHMS["ppo"](bootstrap_truncated=bootstrap)
        policy = Policy(
            "policy",
            algorithm,
            FakeEngine(),
            FakeTrainer(),
            "shared",
            critic=Watching(head="values"),
        )
        asyncio.run(policy.learn([group]))
    plain, longer = asked
    assert [len(row.tokens_T) for row in plain] == [3, 3]
    assert [row.tokens_T.tolist() for row in longer] == [[3, 4, 1, 0]] * 2
    assert [row.mask_T.tolist() for row in longer] == [[False, True, True, True]] * 2
