"""Whole runs that train an adapter: what they leave, what they go on with, what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from recorded_runs import train_run
from run_files import VALID, write_project
from tiny import tiny_model, tiny_tokenizer

from paceline.build import evaluate
from paceline.build.replay import replay
from paceline.config import load_run_file
from paceline.errors import ConfigError, ResumeMismatchError
from paceline.models import export_model

LORA = ("trainer.lora.rank=4", "algorithm.kl_coef=0.1", "weight_check.when=always")


def rows(run_dir: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith(("time/", "perf/"))} for r in found]


def saved(run_dir: Path, step: int) -> Path:
    return run_dir / f"checkpoints/step-{step:06d}/policies/policy"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*model.safetensors")
    found: dict[str, torch.Tensor] = safetensors.torch.load_file(file)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a run of three steps, `demo`."""
    made: Path = tmp_path_factory.mktemp("lora")
    train_run(made, *LORA)
    return made


def test_it_learns_from_the_first_step_and_leaves_a_model_and_an_adapter(folder: Path) -> None:
    run_dir = folder / "runs/demo"
    numbers = rows(run_dir)
    assert numbers[0]["train/kl_reference"] == 0.0
    assert 0 < numbers[1]["train/kl_reference"] < numbers[2]["train/kl_reference"]
    norms = [row["train/adapter_norm"] for row in numbers]
    assert 0 < norms[0] < norms[1] < norms[2]
    # The engine samples from the trainer's own module.
    assert max(row["train/mismatch_max"] for row in numbers) < 1e-5
    base, models = tensors(folder / "model"), [tensors(saved(run_dir, n) / "model") for n in (1, 3)]
    for name, tensor in base.items():
        is_adapted = name.endswith("_proj.weight")
        assert torch.equal(models[0][name], tensor) is not is_adapted
        assert torch.equal(models[1][name], models[0][name]) is not is_adapted
    assert len(tensors(saved(run_dir, 3) / "adapter")) == 2 * 14


@pytest.mark.parametrize(
    "options",
    [
        ("engine.weights=copy", "memory.order=host"),
        ("run.driver=multi",),
        ("checkpoint.background=true",),
    ],
    ids=str,
)
def test_where_it_is_sampled_from_changes_no_number(folder: Path, options: Any) -> None:
    other = train_run(folder, *LORA, "run.name=other", "run.resume=never", *options)
    assert rows(other) == rows(folder / "runs/demo")
    for name in ("model", "adapter"):
        found, expected = (tensors(saved(r, 3) / name) for r in (other, folder / "runs/demo"))
        assert all(torch.equal(found[n], tensor) for n, tensor in expected.items())
    for path in sorted(other.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def test_a_resumed_run_ends_as_one_that_was_not_stopped(folder: Path) -> None:
    name = "run.name=stopped"
    train_run(folder, *LORA, name, "run.debug_exit_after=1")
    for other, told in (("trainer.lora.alpha=3", "lora.alpha"), ("trainer.lora.rank=2", "rank")):
        with pytest.raises(ResumeMismatchError, match=told):
            train_run(folder, *LORA, name, other)
    run_dir = train_run(folder, *LORA, name)
    assert rows(run_dir) == rows(folder / "runs/demo")
    found, expected = (
        safetensors.torch.load_file(saved(r, 3) / "optimizer.safetensors")
        for r in (run_dir, folder / "runs/demo")
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], tensor) for n, tensor in expected.items())


def test_a_recorded_step_is_replayed_with_its_adapter(folder: Path) -> None:
    found = replay(folder / "runs/demo", 2)
    assert found.compared
    assert not found.differences


def test_a_run_and_its_reference_start_from_an_adapter(folder: Path) -> None:
    adapter = saved(folder / "runs/demo", 3) / "adapter"
    named = ("run.name=second", f"model.adapter={adapter}")
    second = train_run(folder, *LORA, *named)
    third = train_run(
        folder, *LORA, "run.name=third", f"model.path={adapter.parent / 'model'}", "trainer.lr=0.0"
    )
    assert rows(second)[0]["train/kl_reference"] == 0.0
    assert rows(second)[1]["train/kl_reference"] > 0.0
    started = ("rollout/reward", "train/entropy")
    for name in started:
        assert rows(second)[0][name] == pytest.approx(rows(third)[0][name], abs=1e-5)
    # The reference of a whole model includes it too.
    plain = train_run(folder, "algorithm.kl_coef=0.1", "run.name=plain", f"model.adapter={adapter}")
    assert rows(plain)[0]["train/kl_reference"] == 0.0
    with pytest.raises(ResumeMismatchError, match=r"model\.adapter"):
        train_run(folder, *LORA, "run.name=second")
    evals = 'evals.sets=[{name="held", data={path="prompts.jsonl"}}]'
    run_file = load_run_file(folder / "run.toml", [*LORA, *named, evals])
    # A checkpoint's model is whole: the adapter is not added once more.
    reports = [evaluate(run_file, weights=path) for path in (None, adapter.parent / "model")]
    reward = [report.values["eval/held/reward"] for report in reports]
    assert reward[0] == reward[1]


def test_a_critic_beside_an_adapter_learns_with_all_its_weights(folder: Path) -> None:
    run_dir = train_run(
        folder, *LORA, "run.name=ppo", "algorithm.kind=ppo", "critic.lr=0.02", "run.num_steps=2"
    )
    critic = tensors(saved(run_dir, 2) / "critic/model")
    base = tensors(folder / "model")
    assert all(not torch.equal(t, base[f"model.{name}"]) for name, t in critic.items())
    assert not (saved(run_dir, 2) / "critic/adapter").exists()
    assert rows(run_dir)[1]["train/adapter_norm"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_in_processes_of_their_own_give_the_same_run(folder: Path) -> None:
    """Weights come to the engine merged, under the names that it knows."""
    sharded = train_run(folder, *LORA, "run.name=sharded", "trainer.kind=fsdp", "trainer.ranks=2")
    for found, expected in zip(rows(sharded), rows(folder / "runs/demo"), strict=True):
        for name in ("rollout/reward", "train/loss", "train/grad_norm", "train/adapter_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5)
        assert found["train/mismatch_max"] < 1e-5


@pytest.mark.slow
def test_it_learns_a_small_task(tmp_path: Path) -> None:
    """A random model comes to say digits. Its head, which stays as it is, can tell tokens apart."""
    model = tiny_model(seed=1)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(10)
    export_model(model, tiny_tokenizer(), tmp_path / "apart")
    run_dir = train_run(
        tmp_path,
        *LORA,
        "model.path=apart",
        "run.num_steps=30",
        "algorithm.kl_coef=0.0",
        "rollout.samples_per_prompt=16",
        "trainer.lr=0.02",
        "checkpoint.every=never",
    )
    rewards = [row["rollout/reward"] for row in rows(run_dir)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2, rewards


ENV = "rollout.env=rewards.py:score"
TWO = """
[policies.one]
[policies.two]
learns = false
"""


@pytest.mark.parametrize(
    ("overrides", "text", "pattern"),
    [
        (["trainer.lora.rank=0"], "", r"trainer\.lora\.rank"),
        (["trainer.lora.targets=[]"], "", r"trainer\.lora\.targets"),
        (["trainer.lora.targets=linear"], "", r"trainer\.lora\.targets"),
        (["trainer.lora.dropout=0.1"], "", r"trainer\.lora\.dropout"),
        (["critic.lora.rank=4", "algorithm.kind=ppo"], "", r"critic\.lora"),
        (["model.adapter=./nothing"], "", r"model\.adapter.*adapter_config.json is not there"),
        (["model.adapter=a", "model.random_init=true"], "", r"leave out `random_init`"),
        (["policies.two.trainer.lora.rank=4", ENV], TWO, r"trainer\.lora.*does not learn"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, overrides: list[str], text: str, pattern: str
) -> None:
    with pytest.raises(ConfigError, match=pattern):
        load_run_file(write_project(tmp_path, VALID + text), overrides)


def test_a_frozen_policy_may_stand_beside_one_with_an_adapter(tmp_path: Path) -> None:
    run_file = load_run_file(write_project(tmp_path, VALID + TWO), ["trainer.lora.rank=4", ENV])
    assert run_file.view("one").trainer.lora is not None


def test_targets_that_match_nothing_end_the_run_with_those_that_would(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'qproj' names no linear layer.*q_proj, up_proj, v_proj"
    ):
        train_run(tmp_path, 'trainer.lora.targets=["qproj"]')
