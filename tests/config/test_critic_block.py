"""The `[critic]` block: when it may be there, what it inherits, what its defaults are."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_files import VALID, write_project

from paceline.config import load_run_file, write_run_file
from paceline.errors import ConfigError
from paceline.trainers.base import CriticConfig

PPO = VALID + '[algorithm]\nkind = "ppo"\n'


def test_the_defaults_apply_where_the_algorithm_needs_a_critic(tmp_path: Path) -> None:
    run_file = load_run_file(write_project(tmp_path, PPO))
    assert run_file.critic == CriticConfig()
    assert run_file.critic_model == run_file.model
    assert load_run_file(write_project(tmp_path, VALID)).critic is None


def test_the_resolved_file_spells_the_critic_out_and_loads_equal(tmp_path: Path) -> None:
    run_file = load_run_file(write_project(tmp_path, PPO))
    written = write_run_file(run_file, tmp_path / "resolved.toml")
    assert "[critic]\nwarmup_steps = 0\nlr = 1e-05\n" in written.read_text()
    assert load_run_file(written) == run_file


def test_a_model_of_its_own_is_located_like_the_policys(tmp_path: Path) -> None:
    text = PPO + '[critic]\nlr = 3e-5\nmodel = { path = "org/other" }\n'
    run_file = load_run_file(write_project(tmp_path, text))
    assert run_file.critic_model.path == "org/other"
    assert run_file.critic_settings.for_trainer(run_file.trainer).lr == 3e-5


@pytest.mark.parametrize(
    ("text", "overrides", "pattern"),
    [
        (VALID, ["critic.lr=1e-4"], r"critic.*grpo has no critic.*algorithm\.kind = \"ppo\""),
        (PPO, ["critic.warmup_steps=4"], r"critic\.warmup_steps.*found 4.*3 steps"),
        (PPO, ["critic.warmup_steps=-1"], r"critic\.warmup_steps.*found -1"),
        (PPO, ["critic.betas=[0.9, 0.9]"], r"critic\.betas.*unknown key.*trainer\.betas"),
        (PPO, ["critic.model.path=./nothing"], r"critic\.model\.path.*is not there"),
        (
            PPO,
            ["critic.model.path=org/other", "critic.model.dtype=float16"],
            r"critic\.model\.dtype.*float16 can not be trained",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, text: str, overrides: list[str], pattern: str
) -> None:
    with pytest.raises(ConfigError, match=pattern):
        load_run_file(write_project(tmp_path, text), overrides)


def test_warm_up_may_be_the_whole_run(tmp_path: Path) -> None:
    run_file = load_run_file(write_project(tmp_path, PPO), ["critic.warmup_steps=3"])
    assert run_file.critic_settings.warmup_steps == run_file.run.num_steps == 3
