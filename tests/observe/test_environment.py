from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from paceline.observe.environment import describe_environment, hide_secrets, write_environment


def test_what_a_run_was_made_with(tmp_path: Path) -> None:
    found = describe_environment(threads=2, devices=["cuda:0 X"], command=["paceline", "train"])
    assert found["threads"] == 2
    assert found["devices"] == ["cuda:0 X"]
    assert found["command"] == ["paceline", "train"]
    assert {"torch", "transformers"} <= set(found["packages"])
    assert found["python"].count(".") == 2
    write_environment(tmp_path / "run", found)
    assert json.loads((tmp_path / "run" / "environment.json").read_text()) == found


def test_no_environment_variable_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "hunter2hunter2")
    assert "hunter2" not in json.dumps(describe_environment())


def test_options_that_sound_secret_are_hidden() -> None:
    command = [
        "train",
        "--api-key",
        "abc",
        "wandb.token=x",
        "--lr",
        "1",
        "password=",
        "--key",
        "-v",
    ]
    assert hide_secrets(command) == [
        "train", "--api-key", "***", "wandb.token=***", "--lr", "1", "password=***", "--key", "-v",
    ]  # fmt: skip
    assert hide_secrets(["max_tokens=5", "--sampling.max_tokens", "7"]) == [
        "max_tokens=5", "--sampling.max_tokens", "7",
    ]  # fmt: skip


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@x", *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def test_the_commit_of_the_working_folder(tmp_path: Path) -> None:
    assert describe_environment(folder=tmp_path)["git"] is None
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert describe_environment(folder=tmp_path)["git"] == {
        "commit": commit,
        "is_modified": False,
    }
    (tmp_path / "a").write_text("2")
    assert describe_environment(folder=tmp_path)["git"]["is_modified"] is True


def test_without_git_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_environment(folder=tmp_path)["git"] is None
