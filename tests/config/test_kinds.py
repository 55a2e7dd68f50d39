from __future__ import annotations

from pathlib import Path

import pytest
from run_files import VALID, write_project

from paceline.config import load_run_file, write_run_file
from paceline.errors import ConfigError


def test_another_kind_of_a_block_leaves_the_keys_of_the_former_one(tmp_path: Path) -> None:
    text = VALID + '[engine]\nkind = "sglang"\nreplicas = 2\ndtype = "bfloat16"\n'
    path = write_project(tmp_path, text)
    run_file = load_run_file(path, ["engine.kind=embedded", "engine.max_batch=4"])
    assert run_file.engine.model_dump(exclude_unset=True) == {
        "kind": "embedded", "dtype": "bfloat16", "max_batch": 4
    }  # fmt: skip
    resolved = write_run_file(load_run_file(path), tmp_path / "resolved.toml")
    assert load_run_file(resolved, ["engine.kind=embedded"]).engine.kind == "embedded"
    assert load_run_file(path, ['engine={kind="embedded"}']).engine.kind == "embedded"
    assert load_run_file(path, ["engine.kind=vllm", "engine="]).engine.kind == "embedded"
    # What nobody's kind has, or who overrides asks for, is refused as ever.
    for wrong in ("engine.replicsa=2", "engine.replicas=3", "engine={replicas=3}"):
        with pytest.raises(ConfigError, match=r"engine\.replic"):
            load_run_file(path, ["engine.kind=embedded", wrong])


def test_another_kind_has_its_own_defaults_over_a_resolved_file(tmp_path: Path) -> None:
    path = write_project(tmp_path)
    kinds = ["grpo", "gspo", "cispo", "rloo", "reinforce_pp"]
    for former in kinds:
        own = [f"algorithm.kind={former}", "algorithm.kl_coef=0.125"]
        resolved = write_run_file(load_run_file(path, own), tmp_path / f"{former}.toml")
        for chosen in kinds:
            fresh = load_run_file(path, [f"algorithm.kind={chosen}", "algorithm.kl_coef=0.125"])
            switched = load_run_file(resolved, [f"algorithm.kind={chosen}"])
            assert switched.algorithm == fresh.algorithm, (former, chosen)
