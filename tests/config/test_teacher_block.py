"""The `[teacher]` block: when it must and may be there, and what it may say."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_files import VALID, write_project

from paceline.config import load_run_file, write_run_file
from paceline.errors import ConfigError
from paceline.explain import explain

NO_REWARD = VALID.replace('[reward]\nkind = "exact"\n', "")
DISTILL = NO_REWARD + '[algorithm]\nkind = "distill"\n'
LOADED = DISTILL + '[teacher]\nmodel.path = "org/teacher"\n'
SERVED = DISTILL + '[teacher]\nurl = "http://127.0.0.1:30000/"\n'


def test_distillation_needs_no_reward(tmp_path: Path) -> None:
    run_file = load_run_file(write_project(tmp_path, LOADED))
    assert run_file.teacher is not None
    assert run_file.teacher.model is not None
    assert run_file.teacher.model.dtype == "float32"
    assert load_run_file(write_project(tmp_path, VALID)).teacher is None


def test_a_served_teacher_is_named_by_its_url(tmp_path: Path) -> None:
    run_file = load_run_file(write_project(tmp_path, SERVED), ["teacher.timeout_s=5"])
    assert run_file.teacher is not None
    assert run_file.teacher.url == "http://127.0.0.1:30000"
    assert (run_file.teacher.max_in_flight, run_file.teacher.timeout_s) == (32, 5.0)


@pytest.mark.parametrize("text", [LOADED, SERVED])
def test_the_resolved_file_loads_equal(tmp_path: Path, text: str) -> None:
    run_file = load_run_file(write_project(tmp_path, text))
    assert load_run_file(write_run_file(run_file, tmp_path / "resolved.toml")) == run_file


def test_a_teacher_may_be_held_in_any_type(tmp_path: Path) -> None:
    run_file = load_run_file(write_project(tmp_path, LOADED), ["teacher.model.dtype=float16"])
    assert run_file.teacher is not None
    assert run_file.teacher.model is not None
    assert run_file.teacher.model.dtype == "float16"


@pytest.mark.parametrize(
    ("text", "overrides", "pattern"),
    [
        (DISTILL, [], r"teacher: missing: distill learns from a teacher.*model\.path.*url = "),
        (VALID, ["teacher.model.path=org/x"], r"teacher.*grpo has no teacher: take the block out"),
        (LOADED, ["teacher.url=http://host"], r"teacher.*loaded.*or served.*both are set"),
        (DISTILL, ["teacher.retries=1"], r"teacher.*loaded.*or served.*neither is set"),
        (
            SERVED,
            ["teacher.url=127.0.0.1:30000"],
            r"teacher\.url.*found '127\.0\.0\.1:30000'.*http://",
        ),
        (
            SERVED,
            ["teacher.url=http://"],
            r"teacher\.url.*allowed: http:// or https:// with a host",
        ),
        (SERVED, ["teacher.url=http://host:99999"], r"teacher\.url.*found 'http://host:99999'"),
        (SERVED, ["teacher.url=http://host/x?y=1"], r"teacher\.url.*allowed: http"),
        (SERVED, ["teacher.max_in_flight=0"], r"teacher\.max_in_flight.*found 0"),
        (SERVED, ["teacher.timeout_s=0"], r"teacher\.timeout_s.*found 0"),
        (
            SERVED,
            ["rollout.sampling.temperature=0.7"],
            r"rollout\.sampling\.temperature.*found 0\.7.*at temperature 1 only.*teacher\.model",
        ),
        (LOADED, ["teacher.model.path=./nothing"], r"teacher\.model\.path.*is not there"),
        (LOADED, ["teacher.model.tokenizer=./no"], r"teacher\.model\.tokenizer.*is not there"),
        (LOADED, ["teacher.model.dtyp=float32"], r"teacher\.model\.dtyp.*unknown key"),
        (LOADED, ["algorithm.reward_coef=0.5"], r"reward: missing: the algorithm learns from rew"),
        (LOADED, ["rollout.dynamic_sampling=true"], r"reward: missing: .*dynamic_sampling drops"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, text: str, overrides: list[str], pattern: str
) -> None:
    with pytest.raises(ConfigError, match=pattern):
        load_run_file(write_project(tmp_path, text), overrides)


def test_a_loaded_teacher_takes_any_temperature(tmp_path: Path) -> None:
    load_run_file(write_project(tmp_path, LOADED), ["rollout.sampling.temperature=0.7"])


def test_all_errors_come_at_once(tmp_path: Path) -> None:
    overrides = ["teacher.model.path=./nothing", "teacher.retries=-1", "trainer.lr=-1"]
    with pytest.raises(ConfigError) as found:
        load_run_file(write_project(tmp_path, LOADED), overrides)
    assert all(key in str(found.value) for key in ("teacher.retries", "trainer.lr"))


def test_only_training_needs_the_teacher(tmp_path: Path) -> None:
    load_run_file(write_project(tmp_path, DISTILL), purpose="generate")
    load_run_file(
        write_project(tmp_path, SERVED), ["rollout.sampling.temperature=0.7"], purpose="generate"
    )


def test_the_keys_are_explained() -> None:
    assert "SGLang" in explain("teacher.url")
    assert "seconds" in explain("teacher.timeout_s")
    assert "requests" in explain("teacher.max_in_flight")
    assert "teacher.url" in explain("teacher.retries")
    assert "policy" in explain("teacher.model.path") or "model" in explain("teacher.model.path")


SEVERAL = """
[policies.pupil]
algorithm.kind = "distill"
[policies.other]
[rollout]
env = "game.py:play"
"""


def test_of_several_policies_those_have_the_teacher_that_need_one(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text("async def play(prompt, actors):\n    return 0.0\n")
    text = VALID + SEVERAL + '[teacher]\nurl = "http://host:1"\n'
    run_file = load_run_file(write_project(tmp_path, text))
    assert run_file.view("other").teacher is None
    assert run_file.view("pupil").teacher == run_file.teacher
    with pytest.raises(ConfigError, match=r"teacher .*: no policy learns from it"):
        load_run_file(
            write_project(tmp_path, text), ["policies.pupil.teacher.model.path=org/teacher"]
        )
    text = VALID + SEVERAL
    with pytest.raises(ConfigError, match=r"policies\.pupil\.teacher.*missing: distill learns"):
        load_run_file(write_project(tmp_path, text))
    own = load_run_file(write_project(tmp_path, text), ["policies.pupil.teacher.model.path=org/x"])
    assert own.policies["pupil"].teacher is not None
    assert own.view("pupil").teacher == own.policies["pupil"].teacher
