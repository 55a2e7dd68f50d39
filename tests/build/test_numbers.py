from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_runs import train_run
from transformers import LlamaForCausalLM

from paceline.algorithms.base import LossInputs
from paceline.algorithms.cispo import Cispo
from paceline.algorithms.grpo import Grpo
from paceline.algorithms.gspo import Gspo
from paceline.algorithms.sft import Sft
from paceline.build.numbers import SampleNumbers, sample_numbers
from paceline.build.recorded import read_step
from paceline.build.scoring import clipped_tokens, token_losses


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with all checkpoints; not to be changed."""
    return train_run(tmp_path_factory.mktemp("project"), "rollout.sampling.temperature=0.8")


def all_numbers(run_dir: Path, step: int) -> list[SampleNumbers]:
    recorded = read_step(run_dir, step)
    return [sample_numbers(recorded, index) for index in range(len(recorded.records))]


def column(numbers: SampleNumbers, name: str) -> list[Any]:
    return [getattr(token, name) for token in numbers.trained]


def logprobs_of(folder: Path, tokens: list[int], temperature: float) -> torch.Tensor:
    """Of every token but the first, straight from the model."""
    model = LlamaForCausalLM.from_pretrained(folder).double()
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]])).logits[0] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_logprobs_are_those_of_the_weights_before_and_after(run_dir: Path) -> None:
    recorded = read_step(run_dir, 2)
    numbers = sample_numbers(recorded, 3)
    tokens = recorded.records[3].tokens
    trained = [token.position for token in numbers.trained]
    assert trained == [t for t, inside in enumerate(recorded.records[3].mask) if inside]
    for name, step in (("old", 1), ("new", 2)):
        folder = run_dir / "checkpoints" / f"step-{step:06d}" / "policies" / "policy" / "model"
        expected = logprobs_of(folder, tokens, 0.8)[[t - 1 for t in trained]]
        assert column(numbers, name) == pytest.approx(expected.tolist(), abs=1e-5)
    assert column(numbers, "behaviour") == pytest.approx(column(numbers, "old"), abs=1e-5)
    gaps = zip(column(numbers, "new"), column(numbers, "old"), strict=True)
    assert column(numbers, "ratio") == pytest.approx([math.exp(a - b) for a, b in gaps])
    assert column(numbers, "version") == [1] * len(trained)
    assert [token.token for token in numbers.tokens] == tokens
    assert numbers.tokens[0].weight is None
    assert numbers.tokens[0].old is None
    assert numbers.notes == []


def test_the_first_step_begins_with_the_model_of_the_run_file(run_dir: Path) -> None:
    numbers = sample_numbers(read_step(run_dir, 1), 0)
    base = run_dir.parent.parent / "model"
    expected = logprobs_of(base, numbers.record.tokens, 0.8)
    expected = expected[[token.position - 1 for token in numbers.trained]]
    assert column(numbers, "old") == pytest.approx(expected.tolist(), abs=1e-5)


def test_losses_of_all_samples_add_up_to_the_recorded_one(run_dir: Path) -> None:
    for step in (1, 2, 3):
        found = all_numbers(run_dir, step)
        total = math.fsum(numbers.loss or 0.0 for numbers in found)
        assert total == pytest.approx(found[0].recorded_loss, abs=1e-6)
        assert math.fsum(w for n in found for w in column(n, "weight")) == pytest.approx(1)


def test_advantages_and_clips_are_those_of_a_hand(run_dir: Path) -> None:
    found = all_numbers(run_dir, 2)
    assert any(numbers.record.advantage for numbers in found)
    for numbers in found:
        rewards = [entry.reward for entry in numbers.rewards]
        assert [entry.is_own for entry in numbers.rewards].count(True) == 1
        assert len(rewards) == 4
        mean = sum(rewards) / 4
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 3)
        expected = (numbers.record.reward - mean) / (std + 1e-6) if std else 0.0
        for token in numbers.trained:
            assert token.advantage == pytest.approx(expected)
            assert token.loss == pytest.approx(-token.weight * expected, rel=1e-5)
            moved = token.ratio > 1.2 if expected > 0 else token.ratio < 0.8
            assert token.is_clipped == (moved and expected != 0)
    assert any(token.is_clipped for numbers in found for token in numbers.trained)


def test_what_was_not_saved_is_left_out_and_said(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir.parent.parent, tmp_path / "project")
    copied = tmp_path / "project" / "runs" / "demo"
    shutil.rmtree(copied / "checkpoints" / "step-000003")
    numbers = sample_numbers(read_step(copied, 3), 0)
    assert numbers.loss is not None
    assert column(numbers, "new") == column(numbers, "ratio") == [None] * len(numbers.trained)
    assert "there is no checkpoint of step 3" in numbers.notes[0]
    shutil.rmtree(copied / "checkpoints" / "step-000001")
    numbers = sample_numbers(read_step(copied, 2), 0)
    assert numbers.loss is None
    assert None not in column(numbers, "advantage") + column(numbers, "weight")
    assert "weights of step 1" in numbers.notes[0]


@pytest.mark.slow
def test_each_update_has_its_own_weights(tmp_path: Path) -> None:
    run_dir = train_run(
        tmp_path, "trainer.updates_per_step=3", "algorithm.kl_coef=0.1", "run.num_steps=1"
    )
    found = all_numbers(run_dir, 1)
    assert {numbers.update for numbers in found} == {1, 2, 3}
    assert {numbers.num_updates for numbers in found} == {3}
    for update in (1, 2, 3):
        own = [numbers for numbers in found if numbers.update == update]
        weights = [weight for numbers in own for weight in column(numbers, "weight")]
        assert math.fsum(weights) == pytest.approx(1)
        assert own[0].update_tokens == len(weights)


@pytest.mark.slow
def test_dropped_samples_have_no_weight(tmp_path: Path) -> None:
    run_dir = train_run(
        tmp_path, "rollout.dynamic_sampling=true", "rollout.over_sampling=2", "run.num_steps=1"
    )
    recorded = read_step(run_dir, 1)
    index = next(i for i, record in enumerate(recorded.records) if record.dropped)
    numbers = sample_numbers(recorded, index)
    assert "was not trained on" in numbers.notes[0]
    assert column(numbers, "weight") == [None] * len(numbers.trained)
    assert len(numbers.rewards) == 4


@pytest.mark.slow
def test_supervised_and_critic_runs(tmp_path: Path) -> None:
    run_dir = train_run(tmp_path / "sft", "algorithm.kind=sft", "run.num_steps=1")
    found = all_numbers(run_dir, 1)
    assert sum(n.loss or 0.0 for n in found) == pytest.approx(found[0].recorded_loss, abs=1e-6)
    assert column(found[0], "is_clipped") == [None] * len(found[0].trained)
    unknown = [None] * len(found[0].trained)
    assert column(found[0], "behaviour") == column(found[0], "version") == unknown

    run_dir = train_run(
        tmp_path / "ppo", "algorithm.kind=ppo", "algorithm.gamma=0.9", "run.num_steps=1"
    )
    found = all_numbers(run_dir, 1)
    assert "are those that were recorded" in found[0].notes[0]
    one = next(numbers for numbers in found if isinstance(numbers.record.advantage, list))
    assert one.record.advantage == column(one, "advantage")
    assert sum(n.loss or 0.0 for n in found) == pytest.approx(found[0].recorded_loss, abs=1e-6)


def inputs(log_ratios: list[float], advantages: list[float]) -> LossInputs:
    old_N = torch.full((len(log_ratios),), -1.0).double()
    return LossInputs(
        logprobs_N=old_N + torch.tensor(log_ratios),
        old_logprobs_N=old_N,
        behaviour_logprobs_N=old_N,
        advantages_N=torch.tensor(advantages).double(),
        weights_N=torch.full_like(old_N, 0.25),
        rows_N=torch.zeros(len(log_ratios), dtype=torch.int64),
        num_rows=1,
    )


def test_clips_are_told_for_tokens_and_for_answers() -> None:
    moved = inputs([0.0, 0.5, -0.5, 3.0], [1.0] * 4)
    assert clipped_tokens(Grpo(), moved) == [False, True, False, True]
    assert clipped_tokens(Cispo(), moved) == [False, False, False, True]
    assert clipped_tokens(Gspo(), moved) == [True] * 4
    back = inputs([0.0, 0.5, -0.5, 0.0], [1.0] * 4)
    assert clipped_tokens(Gspo(), back) == [False] * 4
    assert clipped_tokens(Sft(), moved) is None


@pytest.mark.parametrize("algorithm", [Grpo(), Cispo(), Gspo(), Sft()])
def test_losses_of_tokens_add_up(algorithm: Any) -> None:
    moved = inputs([0.0, 0.5, -0.5, 3.0], [1.0, -1.0, 2.0, 0.0])
    expected = float(algorithm.loss(moved).loss)
    assert math.fsum(token_losses(algorithm, moved)) == pytest.approx(expected)
