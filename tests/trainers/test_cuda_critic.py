"""A trainer, a critic and a teacher on a GPU, in turns with an engine: the numbers of the CPU."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded_runs import RUN_FILE, train_run
from tiny import tiny_model, tiny_tokenizer
from trainer_rows import VOCAB, assert_equal, model64, numbers, random_rows, weights

from paceline.algorithms.critic import ValueObjective
from paceline.build.replay import replay
from paceline.teachers.loaded import LoadedTeacher
from paceline.trainers.base import SingleTrainerConfig
from paceline.trainers.single import SingleTrainer
from paceline.trainers.values import ValueModel
from paceline.types import Batch, Row

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ON_GPU = ("trainer.device=cuda", "trainer.deterministic=true", "run.num_steps=2")
TURNS = ("memory.order=host", "engine.weights=copy", "run.name=turns")
PPO = (
    "algorithm.kind=ppo",
    "algorithm.gae_lambda=0.9",
    "algorithm.bootstrap_truncated=true",
    "critic.lr=0.02",
)


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in r.items() if not k.startswith(("time/", "perf/"))} for r in rows]


def critic_on(device: str) -> tuple[SingleTrainer, ValueModel]:
    model = ValueModel(model64().base_model)
    with torch.no_grad():
        model.head.weight.copy_(torch.linspace(-1, 1, model.head.weight.numel())[None])
    config = SingleTrainerConfig(device=device, lr=1e-3, deterministic=device != "cpu")
    return SingleTrainer(config, model, None, ValueObjective(value_clip=0.2), horizon=10), model


def valued_rows() -> list[Row]:
    rows = random_rows()
    rng = np.random.default_rng(1)
    for row in rows:
        row.values_T, row.returns_T = rng.normal(size=(2, len(row.tokens_T))) * row.mask_T
    return rows


def learn(trainer: SingleTrainer, *, moves: bool = False) -> list[dict[str, float]]:
    async def run() -> list[dict[str, float]]:
        found = []
        for _ in range(2):
            metrics = await trainer.forward_backward(Batch("policy", valued_rows()))
            report = await trainer.optim_step()
            found.append({**numbers(metrics), "grad_norm": report.grad_norm})
            if moves:
                await trainer.place("host")
                await trainer.place("device")
        return found

    return asyncio.run(run())


def test_a_critic_has_the_values_and_gradients_of_the_cpu() -> None:
    on_cpu, on_gpu = critic_on("cpu")[0], critic_on("cuda")[0]
    both = [asyncio.run(t.forward(random_rows(), "values")) for t in (on_cpu, on_gpu)]
    for expected_T, found_T in zip(*both, strict=True):
        np.testing.assert_allclose(found_T, expected_T, rtol=1e-5, atol=1e-7)
    for found, expected in zip(learn(on_gpu), learn(on_cpu), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_a_critic_that_goes_to_the_host_and_back_learns_the_same_bits() -> None:
    (stays, kept), (moves, moved) = critic_on("cuda"), critic_on("cuda")
    assert learn(moves, moves=True) == learn(stays)
    assert_equal(weights(moved), weights(kept))


@pytest.mark.parametrize("top_k", [0, 4])
def test_a_teacher_grades_as_on_the_cpu_and_leaves_the_device(top_k: int) -> None:
    graded = []
    for device in ("cpu", "cuda"):
        config = SingleTrainerConfig(device=device)
        start = "host" if device == "cuda" else "device"
        model, rows = model64(7), random_rows()
        teacher = LoadedTeacher(config, model, "x", top_k=top_k, vocab=VOCAB, where=start)
        assert {p.device.type for p in model.parameters()} == {"cpu"}

        async def run(teacher: LoadedTeacher = teacher, rows: list[Row] = rows) -> None:
            await teacher.place("device")
            await teacher.grade(rows)
            await teacher.place("host")
            await teacher.aclose()

        asyncio.run(run())
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        graded.append(rows)
    for expected, found in zip(*graded, strict=True):
        for name in ("teacher_logprobs_T", "teacher_top_logprobs_TK"):
            if getattr(expected, name) is not None:
                own, other = getattr(found, name), getattr(expected, name)
                np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-7)


def test_actor_and_critic_in_turns_give_the_run_in_which_both_stay(tmp_path: Path) -> None:
    """GAE end to end for two steps, the engine and the two trainers one after the other."""
    stays = train_run(tmp_path, *ON_GPU, *PPO, "engine.weights=copy")
    turns = train_run(tmp_path, *ON_GPU, *PPO, *TURNS)
    assert rows_of(turns) == rows_of(stays)
    for row in rows_of(turns):
        assert np.isfinite([row["train/loss"], row["critic/loss"], row["critic/grad_norm"]]).all()
        assert row["critic/grad_norm"] > 0
    assert replay(turns, 2).differences == []


def test_a_student_and_its_teacher_in_turns_give_the_run_in_which_both_stay(tmp_path: Path) -> None:
    tiny_model(seed=9).save_pretrained(tmp_path / "teacher")
    tiny_tokenizer().save_pretrained(tmp_path / "teacher")
    text = (
        RUN_FILE + '[algorithm]\nkind = "distill"\ntop_k = 4\n[teacher]\nmodel.path = "teacher"\n'
    )
    stays = train_run(tmp_path, *ON_GPU, "engine.weights=copy", text=text)
    turns = train_run(tmp_path, *ON_GPU, *TURNS, text=text)
    assert rows_of(turns) == rows_of(stays)
    assert rows_of(turns)[0]["train/kl_teacher"] > 0
