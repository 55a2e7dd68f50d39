"""Whole distillation runs, from a loaded and from a served teacher: what they leave and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from recorded_runs import RUN_FILE, train_run
from teacher_server import serving
from tiny import tiny_model, tiny_tokenizer

from paceline.build.numbers import sample_numbers
from paceline.build.recorded import read_step
from paceline.build.replay import replay
from paceline.cli.numbers import describe_numbers
from paceline.errors import ConfigError, EngineError, ResumeMismatchError

DISTILL = RUN_FILE.replace(
    '[reward]\nkind = "regex"\npattern = "[0-4]"\n', '[algorithm]\nkind = "distill"\n'
)
LOADED = DISTILL + '[teacher]\nmodel.path = "teacher"\n'


VOCAB = len(tiny_tokenizer())


def run(folder: Path, *overrides: str, text: str = LOADED) -> Path:
    """Train a student towards a teacher that stands beside it in the folder."""
    if not (folder / "teacher").exists():
        make_teacher(folder / "teacher")
    tiny_model(seed=1, vocab=VOCAB).save_pretrained(folder / "student")
    tiny_tokenizer().save_pretrained(folder / "student")
    return train_run(folder, "model.path=student", "trainer.device=cpu", *overrides, text=text)


def make_teacher(folder: Path, **settings: Any) -> Any:
    """A model whose next token is rather certain, so that there is something to learn."""
    model = tiny_model(**{"seed": 9, "vocab": VOCAB, **settings})
    with torch.no_grad():
        model.model.norm.weight *= 5
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def rows(run_dir: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith(("time/", "perf/"))} for r in found]


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Both runs sampled the same, and learned the same up to rounding."""
    for one, other in zip(found, expected, strict=True):
        assert one.pop("policy") == other.pop("policy")
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run_dir / f"checkpoints/step-{step:06d}/policies/policy"
    found = safetensors.torch.load_file(folder / "model/model.safetensors")
    return {**found, **{f"moments {k}": v for k, v in _moments(folder).items()}}


def _moments(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return safetensors.torch.load_file(file)


def reverse_kl(student: Any, teacher: Any, prompts: list[str]) -> float:
    """Of the first answer token, over the whole vocabulary."""
    tokenizer, found = tiny_tokenizer(), []
    for prompt in prompts:
        ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
        with torch.no_grad():
            p, q = (m(ids).logits[0, -1].double().log_softmax(-1) for m in (student, teacher))
        found.append(float((p.exp() * (p - q)).sum()))
    return float(np.mean(found))


@pytest.mark.parametrize("top_k", [0, 8])
def test_a_student_comes_near_its_teacher_without_any_reward(tmp_path: Path, top_k: int) -> None:
    teacher = make_teacher(tmp_path / "teacher")
    overrides = ["run.num_steps=24", f"algorithm.top_k={top_k}", "rollout.samples_per_prompt=8"]
    run_dir = run(tmp_path, *overrides, "checkpoint.every=24", "trainer.lr=0.01")
    prompts = [f"{i}+{i}=" for i in range(9)]
    student = type(teacher).from_pretrained(
        run_dir / "checkpoints/step-000024/policies/policy/model"
    )
    before = reverse_kl(tiny_model(seed=1, vocab=VOCAB), teacher, prompts)
    after = reverse_kl(student, teacher, prompts)
    assert before > 0.2
    assert after < 0.5 * before
    found = rows(run_dir)
    kl = [row["train/kl_teacher"] for row in found]
    assert np.mean(kl[-6:]) < 0.8 * np.mean(kl[:6])
    assert "rollout/reward" not in found[0]
    assert found[0]["train/nonfinite_teacher"] == 0
    assert found[0]["train/untrainable_episodes"] == 0


def test_rewards_may_take_part(tmp_path: Path) -> None:
    text = RUN_FILE + '[algorithm]\nkind = "distill"\nreward_coef = 0.5\n'
    found = rows(run(tmp_path, text=text + '[teacher]\nmodel.path = "teacher"\n'))
    assert "rollout/reward" in found[0]
    assert found[0]["train/advantage_abs"] > 0


@pytest.mark.parametrize("options", [[], ["algorithm.top_k=4", "trainer.epochs_per_step=2"]])
def test_an_interrupted_run_ends_in_the_same_bits(tmp_path: Path, options: list[str]) -> None:
    whole = run(tmp_path, *options, "run.num_steps=4")
    options.append("run.name=again")
    run(tmp_path, *options, "run.num_steps=4", "run.debug_exit_after=2")
    again = run(tmp_path, *options, "run.num_steps=4")
    assert rows(again) == rows(whole)
    expected, found = weights(whole, 4), weights(again, 4)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_memory_that_moves_changes_no_number(tmp_path: Path) -> None:
    plain = run(tmp_path, "algorithm.top_k=4")
    moved = run(
        tmp_path,
        "algorithm.top_k=4",
        "run.name=moved",
        "memory.order=host",
        "engine.weights=copy",
    )
    assert rows(moved) == rows(plain)


def test_another_teacher_is_refused_when_a_run_resumes(tmp_path: Path) -> None:
    run(tmp_path)
    make_teacher(tmp_path / "other")
    make_teacher(tmp_path / "larger", layers=3)
    with pytest.raises(ResumeMismatchError, match=r"teacher\.path: saved 'teacher', now 'other'"):
        run(tmp_path, "run.num_steps=4", "teacher.model.path=other")
    make_teacher(tmp_path / "teacher", layers=3)
    with pytest.raises(ResumeMismatchError, match=r"teacher\.parameters\.model\.layers\.2"):
        run(tmp_path, "run.num_steps=4")


def test_a_recorded_step_comes_out_again_bit_for_bit(tmp_path: Path) -> None:
    run_dir = run(tmp_path, "algorithm.top_k=4")
    for step in (1, 3):
        result = replay(run_dir, step)
        assert result.differences == []
        assert result.notes == ["there are no rewards to recompute: the algorithm needs none"]
        assert "train/kl_teacher" in result.metrics
        assert all(kept == found for kept, found in result.metrics.values())


def test_the_numbers_of_a_sample_show_the_teacher_and_add_up(tmp_path: Path) -> None:
    run_dir = run(tmp_path, "rollout.sampling.temperature=0.8")
    recorded = read_step(run_dir, 2)
    found = [sample_numbers(recorded, index) for index in range(len(recorded.records))]
    total = sum(numbers.loss or 0.0 for numbers in found)
    assert total == pytest.approx(found[0].recorded_loss, abs=1e-6)
    numbers = found[0]
    teacher = make_teacher(tmp_path / "copy")
    ids = torch.tensor([numbers.record.tokens])
    with torch.no_grad():
        logprobs = (teacher(ids).logits[0] / 0.8).log_softmax(-1)
    for token in numbers.trained:
        expected = logprobs[token.position - 1, token.token].item()
        assert token.teacher == pytest.approx(expected, abs=1e-5)
        gap = (token.old or 0.0) - (token.teacher or 0.0)
        assert token.loss == pytest.approx((token.weight or 0.0) * gap, abs=1e-6)
    assert "teacher" in "\n".join(describe_numbers(numbers))


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [0, 4])
def test_a_served_teacher_gives_the_run_of_a_loaded_one(tmp_path: Path, top_k: int) -> None:
    setting = f"algorithm.top_k={top_k}"
    loaded = rows(run(tmp_path, setting))
    with serving(make_teacher(tmp_path / "teacher")) as server:
        text = DISTILL + f"\n[teacher]\nurl = '{server.url}'\nretries = 0\n"
        run_dir = run(tmp_path, setting, "run.name=served", text=text)
        assert replay(run_dir, 2).differences == []
    assert_close(rows(run_dir), loaded)


def test_a_served_teacher_that_is_gone_is_named_by_its_url(tmp_path: Path) -> None:
    teacher = make_teacher(tmp_path / "teacher")
    with serving(teacher) as server:
        url = server.url
        text = DISTILL + f"\n[teacher]\nurl = '{url}'\nretries = 0\n"
        run_dir = run(tmp_path, text=text)
    gone = rf"teacher\.url = '{url}' can not be reached"
    with pytest.raises(EngineError, match=gone):
        run(tmp_path, "run.num_steps=4", text=text)
    with pytest.raises(EngineError, match=gone):
        replay(run_dir, 2)
    numbers = sample_numbers(read_step(run_dir, 2), 0)
    assert any("the teacher's log-probs are left out" in note for note in numbers.notes)
    assert any("losses are left out" in note for note in numbers.notes)
    assert numbers.trained[0].old is not None


def test_a_server_with_another_model_is_refused_when_a_run_resumes(tmp_path: Path) -> None:
    with serving(make_teacher(tmp_path / "teacher")) as server:
        text = DISTILL + f"\n[teacher]\nurl = '{server.url}'\nretries = 0\n"
        run(tmp_path, text=text)
        server.name = "models/other"
        with pytest.raises(ResumeMismatchError, match=r"teacher\.model: saved 'models/teacher'"):
            run(tmp_path, "run.num_steps=4", text=text)


def test_a_server_that_fails_in_the_middle_ends_the_run_which_goes_on_later(tmp_path: Path) -> None:
    with serving(make_teacher(tmp_path / "teacher")) as server:
        text = DISTILL + f"\n[teacher]\nurl = '{server.url}'\nretries = 0\n"
        server.faults = [""] * 15 + ["500"]  # of 12 a step, after one to see that it scores
        with pytest.raises(
            EngineError, match=r"teacher\.url = .*answered /generate with status 500"
        ):
            run(tmp_path, text=text)
        assert [row["step"] for row in rows(run(tmp_path, text=text))] == [1, 2, 3]


def test_a_teacher_of_another_vocabulary_is_refused_at_the_start(tmp_path: Path) -> None:
    make_teacher(tmp_path / "teacher")
    tiny_model(vocab=40).save_pretrained(tmp_path / "teacher")
    with pytest.raises(ConfigError, match=r"teacher\.model\.path = .*knows 40 tokens"):
        run(tmp_path)
    make_teacher(tmp_path / "teacher")
    with pytest.raises(ConfigError, match=rf"algorithm\.top_k = 65.*share {VOCAB}"):
        run(tmp_path, "algorithm.top_k=65")
