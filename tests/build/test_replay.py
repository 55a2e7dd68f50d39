from __future__ import annotations

import json
import shutil
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import rewrite_row, rewrite_samples, train_run

from paceline.build.compare import Difference, Tolerance
from paceline.build.replay import Replay, replay
from paceline.errors import ConfigError, DataError, RewardError


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project of a run of three steps; not to be changed."""
    folder = tmp_path_factory.mktemp("project")
    train_run(folder)
    return folder


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """The folder of the run, in a project of one's own."""
    shutil.copytree(trained, tmp_path / "project")
    return tmp_path / "project" / "runs" / "demo"


def is_equal_in_every_bit(result: Replay) -> bool:
    return all(kept == found for kept, found in result.metrics.values())


def named(result: Replay, part: str) -> list[Difference]:
    return [difference for difference in result.differences if difference.part == part]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_an_honest_step_comes_out_bit_for_bit(trained: Path, step: int) -> None:
    result = replay(trained / "runs" / "demo", step)
    assert result.differences == []
    assert result.notes == []
    assert is_equal_in_every_bit(result)
    assert {"train/loss", "train/grad_norm", "train/mismatch_max", "rollout/reward"} <= set(
        result.metrics
    )
    assert result.compared["reward"] == result.compared["advantage"] == 12
    assert result.compared["log-prob"] == result.metrics["train/trained_tokens"][0]
    assert ("step 1" if step == 2 else "step 2" if step == 3 else "run file") in result.weights


def test_nothing_on_disk_is_touched(run_dir: Path) -> None:
    def state() -> dict[str, str]:
        files = (path for path in run_dir.parent.parent.rglob("*") if path.is_file())
        return {str(path): blake2b(path.read_bytes()).hexdigest() for path in files}

    before = state()
    replay(run_dir, 2)
    assert state() == before


def test_a_changed_reward_is_named_with_all_that_no_longer_follows(run_dir: Path) -> None:
    def change(items: list[dict[str, Any]]) -> None:
        items[5]["reward"] = 1.0 - items[5]["reward"]

    rewrite_samples(run_dir, 2, change)
    result = replay(run_dir, 2)
    (difference,) = named(result, "reward")
    place = difference.where
    assert place.startswith("prompt 'add-")
    assert place.endswith("episode 1")
    assert {difference.recorded, difference.replayed} == {0.0, 1.0}
    assert place in [found.where for found in named(result, "advantage")]
    assert "rollout/reward" in [found.where for found in named(result, "metric")]
    assert named(result, "log-prob") == named(result, "text") == []


def test_a_changed_logprob_is_named_with_its_token(run_dir: Path) -> None:
    place: list[str] = []

    def change(items: list[dict[str, Any]]) -> None:
        item = items[7]
        item["logprobs"][2] -= 0.1
        token = item["mask_runs"][0] + 2
        place.append(f"prompt {item['prompt_id']!r}, episode {item['episode']}, token {token}")

    rewrite_samples(run_dir, 2, change)
    result = replay(run_dir, 2)
    (difference,) = named(result, "log-prob")
    assert difference.where == place[0]
    assert difference.recorded == pytest.approx(float(difference.replayed or 0) - 0.1, abs=1e-5)
    changed = {found.where for found in named(result, "metric")}
    of_mismatch = {f"train/mismatch_{name}" for name in ("abs", "kl", "max", "ratio")}
    assert changed == of_mismatch | {"train/effective_sample_share"}
    assert named(result, "reward") == named(result, "advantage") == []


def test_a_changed_row_is_named_by_its_metrics(run_dir: Path) -> None:
    rewrite_row(run_dir, 2, train__loss=0.5, train__grad_norm=2.0, version=7)
    result = replay(run_dir, 2)
    found = {difference.where: difference.recorded for difference in result.differences}
    assert found == {"train/loss": 0.5, "train/grad_norm": 2.0, "version": 7.0}


def test_a_changed_token_is_found_by_its_text(run_dir: Path) -> None:
    def change(items: list[dict[str, Any]]) -> None:
        items[0]["tokens"][-1] = 5 if items[0]["tokens"][-1] != 5 else 6

    rewrite_samples(run_dir, 2, change)
    result = replay(run_dir, 2)
    assert len(named(result, "text")) == 1
    assert len(named(result, "log-prob")) >= 1


def test_the_tolerance_is_that_of_the_caller(run_dir: Path) -> None:
    norm = replay(run_dir, 1).metrics["train/grad_norm"][0]
    rewrite_row(run_dir, 1, train__grad_norm=norm * 1.001)
    assert len(replay(run_dir, 1).differences) == 1
    assert replay(run_dir, 1, tolerance=Tolerance(relative=0.01)).differences == []


def test_without_the_weights_before_it_says_which_steps_there_are(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints" / "step-000001")
    with pytest.raises(DataError, match=r"weights of step 1, .* are there: 1, 3\. .*every=1"):
        replay(run_dir, 2)
    assert replay(run_dir, 3).differences == []


def test_a_damaged_checkpoint_is_not_trusted(run_dir: Path) -> None:
    model = run_dir / "checkpoints" / "step-000001" / "policies" / "policy" / "model"
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"abcd")
    with pytest.raises(DataError, match="is damaged"):
        replay(run_dir, 2)


def test_samples_that_are_not_all_there_are_not_replayed(run_dir: Path) -> None:
    def cut(items: list[dict[str, Any]]) -> None:
        del items[10:]

    rewrite_samples(run_dir, 2, cut)
    with pytest.raises(DataError, match=r"10 of the 12 samples .*max_samples_per_step"):
        replay(run_dir, 2)


def test_a_step_without_row_or_samples_is_not_replayed(run_dir: Path) -> None:
    with pytest.raises(DataError, match="nearest step is 3"):
        replay(run_dir, 9)
    (run_dir / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="no row of step 3"):
        replay(run_dir)
    with pytest.raises(ConfigError, match=r"has no run\.toml"):
        replay(run_dir / "samples")


def test_a_sample_that_lost_its_reward_can_not_be_learned_from(run_dir: Path) -> None:
    def lose(items: list[dict[str, Any]]) -> None:
        items[0]["reward"] = None

    rewrite_samples(run_dir, 2, lose)
    with pytest.raises(RewardError, match="the reward is None"):
        replay(run_dir, 2)


def test_prompts_that_were_changed_are_said(run_dir: Path) -> None:
    path = run_dir.parent.parent / "prompts.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["prompt"] += " "
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = replay(run_dir, 2)
    assert result.differences == []
    assert "12 of 12 rewards are not recomputed" in result.notes[0]
    path.unlink()
    assert "prompts.jsonl" in replay(run_dir, 2).notes[0]


def test_metrics_of_another_version_are_notes(run_dir: Path) -> None:
    rewrite_row(run_dir, 2, train__older=1.0)
    result = replay(run_dir, 2)
    assert result.differences == []
    assert result.notes == ["not compared, since recorded, but not replayed: train/older"]


def test_a_given_reward_can_be_named_later(tmp_path: Path) -> None:
    def reward(completion: str, num_tokens: int) -> float:
        return len(completion) + 0.1 * num_tokens

    run_dir = train_run(
        tmp_path, "reward.kind=", "reward.pattern=", "run.num_steps=1", reward=reward
    )
    result = replay(run_dir)
    assert result.differences == []
    assert result.compared["reward"] == 0
    assert "was given in Python" in result.notes[0]
    result = replay(run_dir, None, ["reward.function=rewards.py:score"])
    assert (result.differences, result.notes, result.compared["reward"]) == ([], [], 12)
    assert len(named(replay(run_dir, None, ["reward.kind=exact"]), "reward")) == 12


VARIANTS = {
    "updates": (
        "trainer.updates_per_step=3", "trainer.epochs_per_step=2", "algorithm.kl_coef=0.1",
        "algorithm.entropy_coef=0.01",
    ),
    "shaped": (
        "rollout.truncated=mask", "rollout.overlong_penalty=0.5", "rollout.overlong_window=3",
        "rollout.dynamic_sampling=true", "rollout.over_sampling=1.5", "rollout.max_refills=30",
    ),
    "stop": (
        'rollout.sampling.stop=["2", "a"]', "reward.kind=", "reward.pattern=",
        "reward.function=rewards.py:score", "rollout.sampling.temperature=0.7",
    ),
    "failures": (
        "reward.kind=", "reward.pattern=", "reward.function=rewards.py:fails_at_times",
        "reward.on_failure=drop_sample",
    ),
    "zeros": (
        "reward.kind=", "reward.pattern=", "reward.function=rewards.py:fails_at_times",
        "reward.on_failure=zero",
    ),
    "epochs": ("run.num_steps=", "run.num_epochs=1", "trainer.lr_schedule=cosine"),
    "sft": ("algorithm.kind=sft", "trainer.updates_per_step=2"),
    "ppo": ("algorithm.kind=ppo", "critic.warmup_steps=1", "trainer.epochs_per_step=2"),
    "corrected": ("algorithm.correction={ level = 'sequence', high = 2.0 }",),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_run_comes_out_bit_for_bit(name: str, tmp_path: Path) -> None:
    run_dir = train_run(tmp_path, *VARIANTS[name])
    for step in (1, 2, 3):
        result = replay(run_dir, step)
        assert result.differences == []
        assert result.notes == []
        assert is_equal_in_every_bit(result)
        assert (result.compared["reward"] >= 12) == (name != "sft")
        assert result.compared["advantage"] or name == "shaped"


@pytest.mark.slow
def test_an_environment_is_not_played_again(tmp_path: Path) -> None:
    run_dir = train_run(
        tmp_path, "rollout.env=rewards.py:twice", "reward.kind=", "reward.pattern=",
        "run.num_steps=2",
    )  # fmt: skip
    result = replay(run_dir, 2)
    assert result.differences == []
    assert is_equal_in_every_bit(result)
    assert "rewards.py:twice" in result.notes[0]
    assert result.compared["advantage"] == 24, "each episode has two rows"

    def change(items: list[dict[str, Any]]) -> None:
        items[3]["logprobs"][0] -= 0.1

    rewrite_samples(run_dir, 2, change)
    (difference,) = named(replay(run_dir, 2), "log-prob")
    assert ", episode 1, row 1, token " in difference.where
