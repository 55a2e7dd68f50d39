"""Checks that what a run file names on disk is there. They look, and read nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from paceline.config.blocks import RunFile, looks_like_path
from paceline.config.checks import Check, Situation, reads
from paceline.config.names import nearest
from paceline.config.problems import KeyPath, Problem
from paceline.data.sources import FileSource, HuggingFaceSource, PythonSource, SourceConfig
from paceline.errors import ConfigError
from paceline.rollout.settings import RewardConfig
from paceline.user_code import split_location

MOST_SIBLINGS = 1000
SINGLE_TURN = "single_turn"


@reads("run.base")
def base_is_there(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    if not run_file.base.is_dir():
        what = "is a file, not a folder" if run_file.base.exists() else "is not there"
        yield Problem(("run", "base"), f"{run_file.base} {what}{_sibling_hint(run_file.base)}")


@reads("run.base", "model.path", "model.random_init", "critic", "teacher")
def model_is_there(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    for block, model in run_file.models.items():
        key = (*block, "path")
        yield from _model_folder(run_file, key, model.path)
        folder = run_file.resolve(model.path)
        if folder.is_dir() and not (folder / "config.json").is_file():
            yield Problem(
                key,
                f"the folder {folder} has no config.json: it must hold a model in Hugging Face "
                "format",
            )


@reads("run.base", "model.tokenizer", "critic", "teacher")
def tokenizer_is_there(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    for block, model in run_file.models.items():
        if model.tokenizer is not None:
            yield from _model_folder(run_file, (*block, "tokenizer"), model.tokenizer)


@reads("run.base", "model.adapter", "critic", "teacher")
def adapter_is_there(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    for block, model in run_file.models.items():
        if model.adapter is None:
            continue
        file = run_file.resolve(model.adapter) / "adapter_config.json"
        if not file.is_file():
            yield Problem(
                (*block, "adapter"),
                f"{file} is not there: the folder must hold an adapter in PEFT's format",
            )


@reads("run.base", "model.chat_template")
def template_is_there(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    if run_file.model.chat_template is not None:
        yield from _file(run_file, ("model", "chat_template"), run_file.model.chat_template)


@reads("run.base", "data")
def data_is_there(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    if run_file.data is None or situation.purpose != "train":
        return
    if run_file.data.path is not None:
        yield from _file(run_file, ("data", "path"), run_file.data.path)
    for index, source in enumerate(run_file.data.sources):
        yield from _source(run_file, ("data", "sources", index), source)


@reads("run.base", "evals.sets")
def eval_data_is_there(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    if situation.purpose not in ("train", "eval"):
        return
    for index, eval_set in enumerate(run_file.evals.sets):
        path = ("evals", "sets", index)
        yield from _source(run_file, (*path, "data"), eval_set.data)
        if eval_set.reward is not None:
            yield from _reward(run_file, (*path, "reward"), eval_set.reward)


@reads("run.base", "reward")
def reward_is_there(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    if situation.purpose != "generate":
        yield from _reward(run_file, ("reward",), run_file.reward)


@reads("run.base", "rollout.env", "evals.sets")
def env_is_there(run_file: RunFile, situation: Situation) -> Iterator[Problem]:
    if situation.purpose not in ("train", "eval"):
        return
    yield from _env(run_file, ("rollout", "env"), run_file.rollout.env)
    for number, eval_set in enumerate(run_file.evals.sets):
        if eval_set.env is not None:
            yield from _env(run_file, ("evals", "sets", number, "env"), eval_set.env)


def _env(run_file: RunFile, path: KeyPath, name: str) -> Iterator[Problem]:
    if name == SINGLE_TURN:
        return
    try:
        split_location(name)
    except ConfigError:
        text = f'found {name!r}, allowed: "{SINGLE_TURN}", "file.py:name" or "module:name"'
        yield Problem(path, text)
        return
    yield from _code(run_file, path, name)


def _source(run_file: RunFile, path: KeyPath, source: SourceConfig) -> Iterator[Problem]:
    match source:
        case FileSource():
            yield from _file(run_file, (*path, "path"), source.path)
        case HuggingFaceSource() if looks_like_path(source.path):
            if not run_file.resolve(source.path).exists():
                where = run_file.resolve(source.path)
                yield Problem((*path, "path"), f"there is no folder {where}")
        case PythonSource():
            yield from _code(run_file, (*path, "function"), source.function)


def _reward(run_file: RunFile, path: KeyPath, reward: RewardConfig) -> Iterator[Problem]:
    if reward.function is not None:
        yield from _code(run_file, (*path, "function"), reward.function)
    for index, part in enumerate(reward.parts):
        if part.function is not None:
            yield from _code(run_file, (*path, "parts", index, "function"), part.function)


def _code(run_file: RunFile, path: KeyPath, location: str) -> Iterator[Problem]:
    """Only a file can be looked for without importing anything: `file.py:name`."""
    file, colon, _ = location.rpartition(":")
    if colon and file.endswith(".py"):
        yield from _file(run_file, path, file)


def _file(run_file: RunFile, path: KeyPath, name: str) -> Iterator[Problem]:
    found = run_file.resolve(name)
    if found.is_file():
        return
    what = "is a folder, not a file" if found.is_dir() else "is not there"
    yield Problem(path, f"{found} {what}{_sibling_hint(found)}")


def _model_folder(run_file: RunFile, path: KeyPath, name: str) -> Iterator[Problem]:
    found = run_file.resolve(name)
    if found.is_dir() or (not found.exists() and not looks_like_path(name)):
        return
    what = "is a file, not a folder" if found.exists() else "is not there"
    hint = _sibling_hint(found) or "; give a folder in Hugging Face format, or a model id"
    yield Problem(path, f"{found} {what}{hint}")


def _sibling_hint(found: Path) -> str:
    if not found.parent.is_dir():
        return ""
    siblings = [path.name for path in islice(found.parent.iterdir(), MOST_SIBLINGS)]
    near = nearest(found.name, siblings)
    return f"; did you mean {near[0]!r}?" if near and near[0] != found.name else ""


PATH_CHECKS: tuple[Check, ...] = (
    base_is_there,
    model_is_there,
    tokenizer_is_there,
    adapter_is_there,
    template_is_there,
    data_is_there,
    eval_data_is_there,
    reward_is_there,
    env_is_there,
)
