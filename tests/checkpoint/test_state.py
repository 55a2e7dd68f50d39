from __future__ import annotations

import json
import math

import pytest

from paceline.checkpoint import PolicyProgress, RunState, check_compatible
from paceline.checkpoint import state as state_module
from paceline.errors import CheckpointError, ResumeMismatchError
from paceline.observe.files import encode_json

FINGERPRINT = {
    "model": {"path": "org/model", "dtype": "float32"},
    "data": {"fingerprint": "a1b2"},
    "algorithm": {"kind": "grpo", "clip": [0.2, 0.28]},
    "seed": 0,
    "samples_per_prompt": 8,
    "max_grad_norm": math.inf,
}


def make_state(**changes: object) -> RunState:
    fields: dict[str, object] = {
        "step": 3,
        "leader": "policy",
        "policies": {"policy": PolicyProgress(step=3, version=6)},
        "seed": 7,
        "fingerprint": FINGERPRINT,
        "metrics": {"policy": {"train/loss": ["mean", 0.1, 3.0]}},
        "threads": 1,
        "environment": {"torch": "2.13.0"},
    }
    return RunState(**(fields | changes))  # type: ignore[arg-type]


def test_a_state_goes_through_json_unchanged() -> None:
    state = make_state(fingerprint={"seed": 0})
    assert RunState.from_json(json.loads(encode_json(state.to_json()))) == state


def test_a_critic_has_a_version_of_its_own_and_may_be_absent() -> None:
    progress = PolicyProgress(3, 6, critic_version=8)
    state = make_state(policies={"policy": progress}, fingerprint={"seed": 0})
    document = json.loads(encode_json(state.to_json()))
    assert RunState.from_json(document) == state
    del document["policies"]["policy"]["critic_version"]
    assert RunState.from_json(document).policies["policy"].critic_version is None


def test_a_checkpoint_without_the_critic_that_the_run_has_is_refused() -> None:
    now = FINGERPRINT | {"critic": {"path": "org/model"}}
    with pytest.raises(ResumeMismatchError, match=r"critic: saved nothing, now \{'path'"):
        check_compatible(make_state(), now)


def test_equal_fingerprints_are_compatible_also_after_a_file() -> None:
    saved = RunState.from_json(json.loads(encode_json(make_state().to_json())))
    now = FINGERPRINT | {"algorithm": {"kind": "grpo", "clip": (0.2, 0.28)}}
    check_compatible(saved, now)


def test_all_differences_are_listed_at_once() -> None:
    now = {
        "model": {"path": "org/other", "dtype": "float32"},
        "data": {"fingerprint": "ffff", "rows": 3},
        "algorithm": {"kind": "grpo", "clip": [0.2, 0.3]},
        "seed": 1,
        "max_grad_norm": 1.0,
    }
    with pytest.raises(ResumeMismatchError) as caught:
        check_compatible(make_state(), now, "runs/x/checkpoints/step-000003")
    lines = str(caught.value).splitlines()
    assert lines[0] == "runs/x/checkpoints/step-000003 belongs to a run with other settings:"
    assert lines[1:-1] == [
        "  model.path: saved 'org/model', now 'org/other'",
        "  data.fingerprint: saved 'a1b2', now 'ffff'",
        "  data.rows: saved nothing, now 3",
        "  algorithm.clip: saved [0.2, 0.28], now [0.2, 0.3]",
        "  seed: saved 0, now 1",
        "  samples_per_prompt: saved 8, now nothing",
        "  max_grad_norm: saved 'Infinity', now 1.0",
    ]
    assert "run.name" in lines[-1]


def test_another_kind_is_one_difference() -> None:
    now = FINGERPRINT | {"algorithm": {"kind": "ppo", "gae_lambda": 0.95}}
    with pytest.raises(ResumeMismatchError) as caught:
        check_compatible(make_state(), now)
    assert str(caught.value).splitlines()[1:-1] == ["  algorithm.kind: saved 'grpo', now 'ppo'"]


def test_long_values_are_cut() -> None:
    with pytest.raises(ResumeMismatchError) as caught:
        check_compatible(make_state(fingerprint={"x": "a" * 200}), {"x": "b"})
    assert "aaa..., now 'b'" in str(caught.value)


def test_a_newer_format_is_refused_with_the_reason() -> None:
    document = make_state().to_json() | {"format": 2}
    with pytest.raises(CheckpointError, match="format 2, and this version of Paceline reads up"):
        RunState.from_json(document, "s.json")


@pytest.mark.parametrize("format_number", [None, "1"])
def test_a_document_without_a_format_is_refused(format_number: object) -> None:
    with pytest.raises(CheckpointError, match="has format"):
        RunState.from_json({"format": format_number})


def test_an_old_format_is_migrated_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    old = make_state().to_json()
    old["main_policy"] = old.pop("leader")
    monkeypatch.setattr(state_module, "FORMAT", 2)
    with pytest.raises(CheckpointError, match=r"format 1, which this version .* no longer reads"):
        RunState.from_json(old)
    monkeypatch.setitem(
        state_module.MIGRATIONS,
        1,
        lambda document: document | {"leader": document.pop("main_policy"), "format": 2},
    )
    migrated = RunState.from_json(old)
    assert migrated.leader == "policy"


def test_a_missing_key_is_named() -> None:
    document = make_state().to_json()
    del document["leader"]
    with pytest.raises(CheckpointError, match=r"not a run state.*leader"):
        RunState.from_json(document)
