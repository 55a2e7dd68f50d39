from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runs import make_checkpoint, run
from run_files import VALID, write_project

from paceline import build
from paceline.build import RunResult
from paceline.build.loop import Terminated
from paceline.cli.app import COMMANDS
from paceline.cli.options import complete_key, complete_override
from paceline.config import RunFile, load_run_file
from paceline.errors import (
    ConfigError,
    DataError,
    EngineError,
    MissingExtraError,
    PacelineError,
)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[RunFile]:
    """Replaces training; holds what it was called with."""
    calls: list[RunFile] = []

    def train(run_file: RunFile, **options: Any) -> RunResult:
        calls.append(run_file)
        evals = {"eval/held/reward": 0.75, "eval/held/prompts": 8.0}
        first = {"eval/held/reward": 0.25}
        return RunResult(run_file.run_dir, 3, 3, first, evals, Path("m/model"))

    monkeypatch.setattr(build, "train", train)
    return calls


def test_check_of_a_right_file_says_what_it_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", write_project(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "is right" in out
    assert "demo: 3 steps" in out
    assert "grpo: 16 prompts x 8 answers a step, 1 update with lr 1e-06" in out


def test_check_prints_all_errors_once_and_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_project(tmp_path, VALID + "[trainer]\nlrr = 1\neps = 'x'\n")
    assert run("check", path, "run.seed=-1") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {path}: 3 errors\n")
    assert "Traceback" not in captured.err
    assert captured.err.count("trainer.lrr") == 1


def test_check_prints_the_resolved_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", write_project(tmp_path), "trainer.lr=0.5", "--resolved") == 0
    assert "lr = 0.5" in capsys.readouterr().out


def test_check_says_that_a_run_would_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_project(tmp_path)
    make_checkpoint(tmp_path / "runs" / "demo", 2)
    assert run("check", path) == 0
    assert "has checkpoints to go on from" in capsys.readouterr().out


HEAVY = ["torch", "transformers", "numpy", "pyarrow", "datasets", "rich.live"]


def test_check_imports_nothing_heavy_and_takes_less_than_a_second(tmp_path: Path) -> None:
    path = write_project(tmp_path)
    code = (
        "import sys; from paceline.cli import main\n"
        f"code = 0\ntry: code = main(['check', {str(path)!r}])\n"
        "except SystemExit as end: code = end.code\n"
        f"print(code, [name for name in {HEAVY} if name in sys.modules])"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr
    # CPU time, since wall time is also that of whatever else runs on the machine.
    spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent_s < 1.0


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, paceline, paceline.config; assert 'train' in dir(paceline); "
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_train_hands_over_the_checked_file(
    tmp_path: Path, trained: list[RunFile], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", write_project(tmp_path), "run.num_steps=7", "trainer.lr=1e-3") == 0
    assert trained[0].run.num_steps == 7
    assert trained[0].trainer.lr == 1e-3
    assert trained[0].run.resume == "auto"
    out = capsys.readouterr().out
    assert "eval/held/reward  0.25   0.75" in out
    assert "eval/held/prompts" not in out
    assert "m/model" in out


@pytest.mark.parametrize(("option", "resume"), [("--resume", "must"), ("--no-resume", "never")])
def test_resume_options(tmp_path: Path, trained: list[RunFile], option: str, resume: str) -> None:
    assert run("train", write_project(tmp_path), option) == 0
    assert trained[0].run.resume == resume


def test_dry_run_prints_the_file_and_trains_nothing(
    tmp_path: Path, trained: list[RunFile], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", write_project(tmp_path), "--dry-run") == 0
    assert trained == []
    assert 'name = "demo"' in capsys.readouterr().out


def test_sft_is_train_with_another_algorithm(tmp_path: Path, trained: list[RunFile]) -> None:
    assert run("sft", write_project(tmp_path)) == 0
    assert getattr(trained[0].algorithm, "kind", None) == "sft"


def test_sft_refuses_a_file_of_another_algorithm(
    tmp_path: Path, trained: list[RunFile], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_project(tmp_path, VALID + '[algorithm]\nkind = "grpo"\n')
    assert run("sft", path) == 2
    assert "algorithm.kind is 'grpo'" in capsys.readouterr().err
    assert run("sft", path, "algorithm.kind=sft") == 0
    assert len(trained) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("c"), 2),
        (DataError("d"), 2),
        (EngineError("e"), 1),
        (MissingExtraError("x", "y", "z"), 1),
        (PacelineError("p"), 1),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("z"), 1),
    ],
)
def test_exit_codes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
) -> None:
    def train(run_file: RunFile) -> RunResult:
        raise error

    monkeypatch.setattr(build, "train", train)
    assert run("train", write_project(tmp_path)) == code
    text = capsys.readouterr().err
    is_expected = isinstance(error, PacelineError | KeyboardInterrupt)
    assert ("Traceback" in text) != is_expected
    assert ("please report it" in text) != is_expected


def test_debug_shows_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", tmp_path / "none.toml", "--debug") == 2
    assert "Traceback" in capsys.readouterr().err


def test_notes_of_an_error_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(run_file: RunFile) -> RunResult:
        error = EngineError("the engine fell over")
        error.add_note("while closing: disk full")
        raise error

    monkeypatch.setattr(build, "train", train)
    assert run("train", write_project(tmp_path)) == 1
    assert capsys.readouterr().err == "error: the engine fell over\nwhile closing: disk full\n"


@pytest.mark.parametrize("words", [["train"], ["nonsense"], ["check", "a.toml", "--nonsense"]])
def test_bad_usage_exits_with_2(words: list[str]) -> None:
    assert run(*words) == 2


@pytest.mark.parametrize("name", [name for name, _, _ in COMMANDS])
def test_every_command_has_help_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, "--help") == 0
    out = capsys.readouterr().out
    assert f"paceline {name}" in out.replace("Usage: paceline", "")
    assert "Example" in out


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert "paceline 0." in capsys.readouterr().out
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert "install-completion" in out
    assert all(name in out for name, _, _ in COMMANDS)


def test_completion_of_keys() -> None:
    assert complete_override("trainer.lr") == [
        "trainer.lr=",
        "trainer.lr_schedule=",
        "trainer.lr_warmup_steps=",
    ]
    assert "algorithm" in complete_key("al")


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "trainer.lr") == 0
    assert "Peak learning rate" in capsys.readouterr().out
    assert run("explain", "trainer.lrr") == 2
    assert "did you mean" in capsys.readouterr().err


@pytest.mark.parametrize("code", [None, 0, 5])
def test_user_code_that_exits_is_no_success(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int | None,
) -> None:
    monkeypatch.setattr(build, "train", lambda run_file: sys.exit(code))
    assert run("train", write_project(tmp_path)) == 1
    err = capsys.readouterr().err
    assert f"{Path(__file__).name}:" in err
    assert f"ended the program by SystemExit({code})" in err


def test_sigterm_keeps_its_exit_code_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(run_file: RunFile) -> RunResult:
        raise Terminated(143)

    monkeypatch.setattr(build, "train", train)
    project = write_project(tmp_path)
    for saved, options, words in (
        ("", [], "holds no checkpoint yet, so the same command begins anew"),
        ("step-000002", [], "holds what was saved, and the same command goes on from there"),
        ("step-000002", ["--no-resume"], "holds what was saved; --resume goes on from there"),
    ):
        (tmp_path / "runs/demo/checkpoints" / saved).mkdir(parents=True, exist_ok=True)
        assert run("train", project, *options) == 143
        assert words in capsys.readouterr().err


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("paceline ")


def test_the_resolved_file_of_a_summary_loads(tmp_path: Path) -> None:
    assert load_run_file(write_project(tmp_path)).run.name == "demo"
