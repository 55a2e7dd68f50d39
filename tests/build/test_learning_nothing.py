"""Runs whose weights stand still."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded_runs import train_run


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_case_24_engine_and_trainer_stay_as_close_as_they_were(
    tmp_path: Path, temperature: float
) -> None:
    run_dir = train_run(
        tmp_path,
        "trainer.lr=0",
        "trainer.updates_per_step=3",
        "run.num_steps=6",
        "checkpoint.every=never",
        f"rollout.sampling.temperature={temperature}",
    )
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert any(row["train/grad_norm"] > 0 for row in rows)
    for name in ("mismatch_abs", "mismatch_kl", "mismatch_max"):
        found = [row[f"train/{name}"] for row in rows]
        assert max(found) - min(found) < 1e-6, (name, found)
    # After the first update of a rollout too, and whatever was sampled meanwhile.
    assert [row["train/ratio"] for row in rows] == pytest.approx([1.0] * 6, abs=1e-6)
    assert {row["train/clip_fraction"] for row in rows} == {0.0}
