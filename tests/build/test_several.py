"""Several policies in one run: everything that a run of one policy leaves and can be asked for."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_runs import run
from safetensors.torch import load_file
from tiny import tiny_model, tiny_tokenizer

from paceline.build import RunResult, evaluate, train
from paceline.build.replay import replay
from paceline.config import load_run_file
from paceline.errors import DataError
from paceline.observe.samples import SampleRecord, find_samples, read_samples

RUN_FILE = """
[run]
name = "demo"
num_steps = 3
seed = 5
deterministic = true
[model]
path = "model"
[data]
path = "prompts.jsonl"
[rollout]
env = "env.py:play"
prompts_per_step = 2
samples_per_prompt = 3
sampling = { max_tokens = 4 }
[trainer]
lr = 0.01
threads = 1
[checkpoint]
every = 1
keep_last = 9
best_metric = "eval/together/reward"
[evals]
every = 3
[[evals.sets]]
name = "together"
data = { path = "held.jsonl" }
[[evals.sets]]
name = "alone"
policy = "verifier"
env = "single_turn"
reward = { kind = "regex", pattern = "[0-4]" }
data = { path = "held.jsonl" }
[observe]
console = "off"
[policies.solver.algorithm]
kind = "ppo"
[policies.solver.critic]
lr = 1e-3
[policies.verifier]
trainer.lr = 0.02
[policies.pupil]
data = { path = "rows.jsonl" }
algorithm.kind = "sft"
[policies.frozen]
learns = false
[roles]
solver = "solver"
verifier = "verifier"
rival = { past = "solver", every = 2 }
referee = "frozen"
"""

ENV = """
async def play(prompt, actors):
    mine = await actors["solver"](prompt)
    theirs = await actors["rival"](prompt)
    await actors["referee"](prompt)
    seen = await actors["verifier"](prompt.text + mine.text + "?")
    gap = len(set(mine.text)) - len(set(theirs.text))
    return {"solver": gap, "rival": -gap, "verifier": len(set(seen.text))}
"""


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


def call(capsys: pytest.CaptureFixture[str], *words: str) -> Said:
    """A command, in this process."""
    capsys.readouterr()
    code = run(*words)
    return Said(code, *capsys.readouterr())


def project(folder: Path) -> Path:
    tiny_model(seed=1).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    rows = [{"id": f"p{i}", "prompt": f"{i}+{i}=", "completion": str(2 * i)} for i in range(9)]
    for name, part in (("prompts", rows[:6]), ("rows", rows[:6]), ("held", rows[6:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (folder / "env.py").write_text(ENV)
    path = folder / "run.toml"
    path.write_text(RUN_FILE)
    return path


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return train(load_run_file(project(tmp_path_factory.mktemp("several")), ()))


def samples_of(run_dir: Path, name: str, step: int) -> list[SampleRecord]:
    return read_samples(find_samples(run_dir / "samples" / f"policy-{name}", step)[1])


def test_each_policy_has_its_own_samples_of_equal_steps(done: RunResult) -> None:
    for name, role in (("solver", "solver"), ("verifier", "verifier"), ("pupil", "pupil")):
        for step in (1, 2, 3):
            learned = [r for r in samples_of(done.run_dir, name, step) if r.learns]
            assert {(r.policy, r.role) for r in learned} == {(name, role)}
    others = [r for r in samples_of(done.run_dir, "solver", 3) if not r.learns]
    assert {(r.role, r.policy) for r in others} == {
        ("rival", "solver@step-0"),
        ("rival", "solver@step-2"),
        ("referee", "frozen"),
    }
    assert not list((done.run_dir / "samples").glob("step-*"))


@pytest.mark.slow
def test_a_new_start_keeps_the_samples_of_the_old_one(done: RunResult, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(done.run_dir.parent.parent, tmp_path / "copy"))
    shutil.rmtree(folder / "runs/demo/checkpoints")
    train(load_run_file(folder / "run.toml", ("run.num_steps=1", "run.base='.'")))
    assert sorted(p.name for p in (folder / "runs/demo/samples/policy-solver").iterdir()) == [
        "step-000001.jsonl.gz"
    ]
    old = folder / "runs/demo/samples.old/policy-verifier"
    assert len(list(old.iterdir())) == 3


@pytest.mark.slow
def test_a_resume_takes_back_only_what_is_done_again(done: RunResult, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(done.run_dir.parent.parent, tmp_path / "copy"))
    root = folder / "runs/demo/checkpoints"
    shutil.rmtree(root / "step-000003")
    (root / "latest").unlink(missing_ok=True)
    again = train(load_run_file(folder / "run.toml", ()))
    assert again.step == 3
    for name in ("solver", "verifier", "pupil"):
        for step in (1, 2, 3):
            path = f"samples/policy-{name}/step-{step:06d}.jsonl.gz"
            assert (again.run_dir / path).read_bytes() == (done.run_dir / path).read_bytes()


def test_inspect_shows_a_policy_and_a_role(
    done: RunResult, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = str(done.run_dir)
    assert "step 3: 6 samples" in call(capsys, "inspect", run_dir).out
    assert "verifier" not in call(capsys, "inspect", run_dir).out
    assert call(capsys, "inspect", run_dir, "--policy", "pupil").out.startswith("step 3: 2 samples")
    shown = call(capsys, "inspect", run_dir, "--role", "rival", "--first", "1").out
    assert "role rival (step-" in shown
    assert "does not learn" in shown
    wrong = call(capsys, "inspect", run_dir, "--policy", "frozen")
    assert wrong.code == 2
    assert "it trains solver, verifier, pupil" in wrong.err


@pytest.mark.parametrize("name", ["solver", "verifier", "pupil"])
def test_a_step_of_each_policy_is_replayed(done: RunResult, name: str) -> None:
    for step in (1, 3):
        result = replay(done.run_dir, step, policy=name)
        assert result.differences == []
        assert result.metrics["train/grad_norm"][0] > 0


@pytest.mark.parametrize("name", ["solver", "verifier", "pupil"])
def test_numbers_of_a_sample_of_each_policy(
    done: RunResult, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = call(capsys, "inspect", str(done.run_dir), "--numbers", "--policy", name).out
    assert "step 3, prompt" in shown
    assert "left out" not in shown


@pytest.mark.slow
def test_a_follower_s_step_is_found_in_the_checkpoint_that_holds_it(
    done: RunResult, tmp_path: Path
) -> None:
    """Each save of the leader holds the follower two steps ahead."""
    folder = Path(shutil.copytree(done.run_dir.parent.parent, tmp_path / "copy"))
    given = ("run.name='ahead'", "run.base='.'", "policies.pupil.schedule.max_lead=2")
    result = train(load_run_file(folder / "run.toml", given))
    found = replay(result.run_dir, 4, policy="pupil")
    assert (found.weights, found.differences) == ("the checkpoint of step 1", [])
    with pytest.raises(DataError, match=r"Steps whose weights are there: 1, 4, 5"):
        replay(result.run_dir, 3, policy="pupil")


def test_each_policy_is_exported(
    done: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = str(done.run_dir)
    for name in ("solver", "verifier", "pupil"):
        out = tmp_path / name
        said = call(capsys, "export", run_dir, str(out), "--policy", name).out
        assert f"policy {name!r} of step 3" in said
        weights = load_file(done.model_paths[name] / "model.safetensors")
        exported = load_file(out / "model.safetensors")
        assert all(bool((exported[key] == weights[key]).all()) for key in weights)
    assert "'solver'" in call(capsys, "export", run_dir, str(tmp_path / "leader")).out
    wrong = call(capsys, "export", run_dir, str(tmp_path / "x"), "--policy", "frozen")
    assert (wrong.code, "it has solver, verifier, pupil" in wrong.err) == (2, True)
    best = call(capsys, "export", run_dir, str(tmp_path / "best"), "--best").out
    assert "of step" in best


def test_a_checkpoint_is_measured_as_in_the_run(
    done: RunResult, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(call(capsys, "eval", str(done.run_dir), "--json").out)
    same = [key for key in found if key.endswith(("reward", "num_tokens"))]
    assert {"eval/together/role/verifier/reward", "eval/alone/reward"} <= set(same)
    assert {key: found[key] for key in same} == {key: done.evals[key] for key in same}


def test_a_model_stands_for_one_of_the_policies(
    done: RunResult, capsys: pytest.CaptureFixture[str]
) -> None:
    model, config = str(done.model_paths["verifier"]), str(done.run_dir / "run.toml")
    wrong = call(capsys, "eval", model, "--config", config)
    assert wrong.code == 2
    assert "say by --policy which of them" in wrong.err
    found = call(capsys, "eval", model, "--config", config, "--policy", "verifier", "--json")
    alone = json.loads(found.out)["eval/alone/reward"]
    assert alone == done.evals["eval/alone/reward"]


@pytest.mark.slow
def test_without_steps_only_the_evals_run(tmp_path: Path) -> None:
    path = project(tmp_path)
    result = train(load_run_file(path, ("run.num_steps=0",)))
    assert result.step == 0
    assert {"eval/together/reward", "eval/alone/reward"} <= result.evals.keys()
    report = evaluate(load_run_file(path, (), purpose="eval"))
    assert report.values["eval/together/reward"] == result.evals["eval/together/reward"]


def test_check_says_who_learns_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = call(capsys, "check", str(project(tmp_path))).out
    assert "ppo: 2 prompts x 3 answers a step, 1 update with lr 0.01, leads" in said
    assert "sft: 2 prompts a step, 1 update with lr 0.01, on data of its own" in said
    assert "model (float32), does not learn" in said
    assert "rival (by earlier solver), referee (by frozen)" in said


def test_where_nothing_learns_there_is_nothing_to_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"policies.{name}.learns=false" for name in ("solver", "verifier", "pupil")]
    wrong = call(capsys, "train", str(project(tmp_path)), "run.num_steps=0", *given)
    assert wrong.code == 2
    assert "none of them learns: set learns = true for one, or measure them by" in wrong.err


def test_frozen_policies_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = project(tmp_path)
    given = [f"policies.{name}.learns=false" for name in ("solver", "verifier")]
    gone = ("policies.pupil=", "policies.solver.critic=", "policies.solver.algorithm=")
    model = str(tmp_path / "model")
    words = ("eval", model, "--config", str(path), "--policy", "verifier", "--json")
    found = call(capsys, *words, *given, *gone, "checkpoint.best_metric=")
    assert found.code == 0, found.err
    assert "eval/together/role/verifier/reward" in json.loads(found.out)
