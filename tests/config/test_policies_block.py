"""`[policies.<name>]`, `[roles]` and `[schedule]`: what is inherited, and what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from run_files import VALID, write_project

from paceline.config import RunFile, load_run_file, render_run_file
from paceline.errors import ConfigError
from paceline.explain import explain

TWO = (
    VALID
    + """
[rollout]
env = "env.py:play"
prompts_per_step = 4
[trainer]
lr = 1e-4
weight_decay = 0.1
[policies.solver]
trainer.lr = 1e-5
[policies.verifier]
algorithm.kind = "rloo"
model.path = "org/small"
rollout.sampling.max_tokens = 8
"""
)


def load(folder: Path, text: str, *overrides: str) -> RunFile:
    path = write_project(folder, text)
    (folder / "env.py").write_text("async def play(prompt, actors):\n    return 0.0\n")
    return load_run_file(path, overrides)


def refused(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    return str(caught.value)


def test_a_policy_says_only_what_is_its_own(tmp_path: Path) -> None:
    run_file = load(tmp_path, TWO)
    solver, verifier = run_file.view("solver"), run_file.view("verifier")
    assert (solver.trainer.lr, solver.trainer.weight_decay) == (1e-5, 0.1)
    assert (verifier.trainer.lr, verifier.trainer.weight_decay) == (1e-4, 0.1)
    assert solver.model.path == "org/model"
    assert verifier.model.path == "org/small"
    assert solver.algorithm.kind == "grpo"
    assert verifier.algorithm.kind == "rloo"
    assert verifier.rollout.sampling.max_tokens == 8
    assert verifier.rollout.env == solver.rollout.env
    assert solver.data == run_file.data


def test_defaults_of_a_run(tmp_path: Path) -> None:
    run_file = load(tmp_path, TWO)
    assert run_file.leader == "solver"
    assert run_file.learners == ("solver", "verifier")
    assert list(run_file.cast) == ["solver", "verifier"]
    assert run_file.is_multi
    one = load(tmp_path, VALID)
    assert one.leader == "policy"
    assert list(one.views) == ["policy"]
    assert one.views["policy"] is one
    assert not one.is_multi
    assert load(tmp_path, VALID, "schedule.max_staleness=1").is_multi


def test_a_block_of_another_kind_starts_from_nothing(tmp_path: Path) -> None:
    text = TWO + '\n[algorithm]\nkind = "grpo"\nnormalize = "none"\n'
    run_file = load(tmp_path, text)
    assert run_file.view("solver").algorithm.normalize == "none"
    assert run_file.view("verifier").algorithm.kind == "rloo"


def test_the_model_may_be_named_by_the_policies_alone(tmp_path: Path) -> None:
    text = TWO.replace('[model]\npath = "org/model"\n', "")
    assert "policies.solver.model" in refused(tmp_path, text)
    run_file = load(tmp_path, text, "policies.solver.model.path=org/other")
    assert run_file.view("solver").model.path == "org/other"


def test_the_resolved_file_loads_equal(tmp_path: Path) -> None:
    run_file = load(tmp_path, TWO + '[roles]\na = "solver"\nb = "verifier"\n')
    again = write_project(tmp_path, render_run_file(run_file), "again.toml")
    assert load_run_file(again) == run_file
    assert tomllib.loads(again.read_text())["policies"]["solver"]["trainer"]["weight_decay"] == 0.1


CASES: list[tuple[str, str, str]] = [
    ('run.leader="solvr"', "run.leader", "did you mean 'solver'?"),
    ("policies.solver.learns=false run.leader=solver", "run.leader", "does not learn"),
    ("policies.solver.learns=false policies.verifier.learns=false", "policies", "none of them"),
    ("policies.solver.schedule.max_lead=2", "policies.solver.schedule.max_lead", "is the leader"),
    ("policies.solver.trainer.lrr=1", "policies.solver.trainer.lrr", "did you mean `lr`?"),
    ("trainer.lr=-1", "trainer.lr", "found -1"),
    ("policies.verifier.trainer.lr=-1", "policies.verifier.trainer.lr", "found -1"),
    ("policies.verifier.algorithm.kind=rlo", "policies.verifier.algorithm", "did you mean 'rloo'"),
    ("roles.x=solvr roles.y=verifier", "roles.x.policy", "did you mean 'solver'?"),
    ("roles.x=solver", "policies.verifier", "it plays no role"),
    ("roles.x={} roles.y=verifier", "roles.x", "one of policy, past or url"),
    ("roles.x.url=ftp://a roles.x.model=m", "roles.x", "does not start with http"),
    ('roles.x.url="http://a"', "roles.x", "needs model"),
    ("roles.x.policy=solver roles.x.keep=3", "roles.x", "only for a role with past"),
    ("rollout.env=single_turn", "rollout.env", "single_turn has one role"),
    ("run.driver=sync", "run.driver", "drives one policy"),
    ("memory.order=host", "memory.order", "sync driver only"),
    ("schedule.publish_every=2", "schedule", "set max_staleness"),
    ("run.deterministic=true schedule.max_staleness=1", "run.deterministic", "max_staleness = 1"),
    ("policies.verifier.engine.weights=shared", "policies.verifier.engine.weights", "a copy"),
    ("schedule.straggler.after_s=1", "schedule", "where sampling runs ahead"),
    ("rollout.samples_per_prompt=1", "rollout.samples_per_prompt", "compares the answers"),
    ("policies.verifier.rollout.sampling.top_p=0.5", "policies.verifier.rollout.sampling", "top_p"),
    ('roles."a/b"=solver roles.y=verifier', 'roles."a/b"', "a role's name is a letter"),
    ("policies.verifier.rollout.truncated=mask", "policies.verifier.rollout.truncated", "as a"),
    ("policies.verifier.reward.kind=exact", "policies.verifier.reward", "data of its own"),
    ("policies.verifier.algorithm.kind=sft", "policies.verifier.algorithm.kind", "data of its"),
    ("schedule.on_full=drop_oldest", "schedule.on_full", "nothing would bound"),
    ("schedule.max_lead=2", "schedule.max_lead", "is the leader"),
    ("policies.shared.data.path=prompts.jsonl", "policies.shared", "have this name"),
    ('policies."9x".model.path=a', 'policies."9x"', "a policy's name is a letter"),
]


@pytest.mark.parametrize(("overrides", "key", "text"), CASES, ids=[case[0] for case in CASES])
def test_what_does_not_fit_is_refused_and_named(
    tmp_path: Path, overrides: str, key: str, text: str
) -> None:
    message = refused(tmp_path, TWO, *overrides.split(" "))
    lines = [line for line in message.splitlines() if line.strip().startswith(key)]
    assert lines, message
    assert any(text in line for line in lines), message


def test_all_errors_come_at_once(tmp_path: Path) -> None:
    message = refused(
        tmp_path, TWO, "run.leader=nobody", "policies.solver.trainer.lr=x", "roles.x=nobody"
    )
    for key in ("run.leader", "policies.solver.trainer.lr", "roles.x.policy"):
        assert key in message


def test_an_inherited_key_is_told_where_it_was_written_and_once(tmp_path: Path) -> None:
    message = refused(tmp_path, TWO, "trainer.lr=-1")
    assert message.count("lr") == message.count("trainer.lr") == 2  # the key, and the override


def test_data_of_its_own_makes_a_policy_play_alone(tmp_path: Path) -> None:
    text = TWO.replace('env = "env.py:play"\n', "") + 'data.path = "prompts.jsonl"\n'
    run_file = load(tmp_path, text)
    assert run_file.shared_policies == ("solver",)
    assert "has data of its own" in refused(tmp_path, text, "roles.a=solver", "roles.b=verifier")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("policies", "learns"),
        ("policies.solver", "learns"),
        ("policies.solver.trainer.lr", "trainer.lr"),
        ("policies.learns", "trainer"),
        ("roles.judge.url", "OpenAI-compatible"),
        ("schedule.max_staleness", "admission"),
    ],
)
def test_explained(name: str, found: str) -> None:
    assert found in explain(name)
