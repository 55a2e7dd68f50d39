"""Paceline from Python: the same runs, settings and errors as with a run file.

    import paceline

    def reward(completion, answer):
        return float(completion.strip() == answer)

    result = paceline.train("path/to/model", "prompts.jsonl", reward, num_steps=100)
    print(result.evals, result.model_path)

No `if __name__ == "__main__":` is needed, and a notebook's running event loop does no harm.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from paceline import build
from paceline.build import EvalReport, RunResult
from paceline.config import RunFile, load_block, load_settings
from paceline.config.checks import GIVEN_EVAL_SET, Purpose
from paceline.config.source import Table, merge, nested
from paceline.engines.base import Sampling
from paceline.errors import ConfigError, RolloutError
from paceline.rollout.settings import ScorerKind
from paceline.types import Message, Prompt

logger = logging.getLogger(__name__)

T = TypeVar("T")
Prompts = str | Path | Iterable[str | Mapping[str, Any] | Prompt]
"""A file, or rows in memory: texts, dictionaries with `prompt` and `answer`, or Prompts."""
Reward = str | Callable[..., Any]
"""A function, a built-in kind such as `exact`, or `file.py:name` / `module:name`."""
STOP_GRACE_S = 60.0
"""How long Ctrl-C in a notebook waits for the run to close what it has open."""


def train(
    model: str | Path,
    prompts: Prompts,
    reward: Reward | None = None,
    *,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    eval_prompts: Prompts | None = None,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    **blocks: Any,
) -> RunResult:
    """Train a model by reinforcement learning (GRPO, unless the settings say otherwise).

    model: a folder in Hugging Face format or a model id. reward: a function that gets what it
    declares among completion, prompt, answer, metadata, messages, finish and num_tokens. name: of
    the run's folder in `runs`; a run of this name goes on where it was; default: a new folder.
    settings: keys of a run file, dotted or as blocks, such as {"trainer.lr": 1e-5}; blocks may be
    keywords too: trainer={"lr": 1e-5}. Relative paths start from the working directory.

    Raises ConfigError with everything that is wrong, and any other PacelineError.
    """
    given = _Given()
    own = _run_settings(model, name, num_steps, num_epochs)
    own |= given.prompts(prompts) | given.reward(reward) | given.evals(eval_prompts, num_steps)
    run_file = _load(own, settings, blocks, given, "train")
    return _outside_a_loop(lambda: build.train(run_file, **given.objects))


def sft(
    model: str | Path,
    prompts: Prompts,
    *,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    eval_prompts: Prompts | None = None,
    reward: Reward | None = None,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    **blocks: Any,
) -> RunResult:
    """Supervised training on rows with `prompt` and `completion`, or chats that end with the
    assistant. `reward` only scores the answers to `eval_prompts`; the rest is as in `train`."""
    given = _Given()
    own = _run_settings(model, name, num_steps, num_epochs) | {"algorithm": {"kind": "sft"}}
    own |= given.prompts(prompts) | given.reward(reward) | given.evals(eval_prompts, num_steps)
    run_file = _load(own, settings, blocks, given, "train")
    return _outside_a_loop(lambda: build.train(run_file, **given.objects))


def evaluate(
    model: str | Path,
    prompts: Prompts,
    reward: Reward | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    **blocks: Any,
) -> EvalReport:
    """Measure a model: the mean reward of its answers to the prompts, as `eval/eval/reward`.

    Raises RolloutError if no answer at all could be scored; a set among several that has no
    numbers is warned about, and named in `skipped`.
    """
    given = _Given()
    own = _run_settings(model, "eval", None, None)
    own |= given.reward(reward) | given.evals(prompts, None)
    run_file = _load(own, settings, blocks, given, "eval")
    report = _outside_a_loop(lambda: build.evaluate(run_file, weights=None, **given.objects))
    reasons = [f"eval set {name!r} has no numbers: {why}" for name, why in report.skipped.items()]
    if reasons and len(reasons) == len(report.samples):
        raise RolloutError("\n".join(reasons))
    for reason in reasons:
        logger.warning("%s", reason)
    return report


def generate(
    model: str | Path,
    prompts: str | Iterable[str | list[Message]],
    *,
    max_tokens: int = 256,
    temperature: float = 1.0,
    sampling: Mapping[str, Any] | None = None,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    **blocks: Any,
) -> list[str]:
    """One answer to each text or chat, in their order; to a single text, a list of one.

    sampling: further keys of `rollout.sampling`, such as {"top_p": 0.9, "stop": ["\\n"]}.
    """
    drawn = {"max_tokens": max_tokens, "temperature": temperature, **(sampling or {})}
    checked = load_block(Sampling, drawn, "sampling")
    run_file = _load(
        _run_settings(model, "generate", None, None), settings, blocks, _Given(), "generate"
    )
    asked = [prompts] if isinstance(prompts, str) else _listed(prompts, "prompts")
    for item in asked:
        if not isinstance(item, str | list | tuple):
            raise ConfigError(
                f"prompts: found {type(item).__name__} in it, allowed: texts, or chats, each a "
                "list of messages; of one chat write [[{'role': 'user', 'content': ...}]]"
            )
    return _outside_a_loop(
        lambda: build.generate(
            run_file.located_model, run_file.embedded_engine, asked, checked, seed=seed
        )
    )


class _Given:
    """Sorts what the caller passed into settings, which are returned, and Python objects."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    def prompts(self, prompts: Prompts) -> Table:
        if isinstance(prompts, str | Path):
            return {"data": {"path": str(prompts)}}
        self.objects["prompts"] = _listed(prompts, "prompts")
        return {}

    def reward(self, reward: Reward | None) -> Table:
        if reward is None:
            return {}
        if not isinstance(reward, str):
            if not callable(reward):
                raise ConfigError(f"reward: found {reward!r}, allowed: a function or a name")
            self.objects["reward"] = reward
            return {}
        kinds = get_args(ScorerKind)
        if reward not in kinds and ":" not in reward:
            raise ConfigError(
                f"reward: found {reward!r}, allowed: a function, 'file.py:name', 'module:name' or "
                f"one of {', '.join(kinds)}"
            )
        return {"reward": {"kind" if reward in kinds else "function": reward}}

    def evals(self, prompts: Prompts | None, num_steps: int | None) -> Table:
        """About ten points over the run, before and after it included."""
        if prompts is None:
            return {}
        every = max(1, num_steps // 10) if isinstance(num_steps, int) else 10
        if isinstance(prompts, str | Path):
            sets = [{"name": GIVEN_EVAL_SET, "data": {"path": str(prompts)}}]
            return {"evals": {"every": every, "sets": sets}}
        self.objects["eval_prompts"] = _listed(prompts, "eval_prompts")
        return {"evals": {"every": every}}


def _listed(rows: Iterable[T], name: str) -> list[T]:
    """The rows as a list. A single row is refused: its keys would be taken for the rows."""
    if isinstance(rows, Mapping | Prompt | bytes) or not isinstance(rows, Iterable):
        what = {dict: "one dict", Prompt: "one Prompt"}.get(type(rows), type(rows).__name__)
        raise ConfigError(
            f"{name}: found {what}, allowed: a file, or a list of rows; pass a list, such as "
            f"{name}=[{{'prompt': '1+1=', 'answer': '2'}}]"
        )
    return list(rows)


def _run_settings(
    model: str | Path, name: str | None, num_steps: int | None, num_epochs: int | None
) -> Table:
    run = {"name": name, "num_steps": num_steps, "num_epochs": num_epochs}
    return {
        "run": {key: value for key, value in run.items() if value is not None},
        "model": {"path": str(model)},
    }


def _load(
    own: Table,
    settings: Mapping[str, Any] | None,
    blocks: Mapping[str, Any],
    given: _Given,
    purpose: Purpose,
) -> RunFile:
    """The caller's settings over those made of the parameters; without a name, a new one."""
    tables = merge(own, merge(nested(settings or {}), nested(blocks)))
    run = tables["run"]
    if isinstance(run, dict) and "name" not in run:
        run["name"] = _new_name(Path(str(run.get("base", "."))) / str(run.get("dir", "runs")))
    return load_settings(tables, purpose=purpose, given=given.objects)


def _new_name(folder: Path) -> str:
    """run-1, or the next number that is free."""
    return next(
        name for number in itertools.count(1) if not (folder / (name := f"run-{number}")).exists()
    )


def _outside_a_loop(call: Callable[[], T]) -> T:
    """Call directly, or in a thread if this one already runs an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    return _in_thread(call)


def _in_thread(call: Callable[[], T]) -> T:
    """The call's result or exception. Ctrl-C is passed on, so that the run closes everything."""
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, name="paceline", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.2)
    except KeyboardInterrupt:
        _interrupt(thread)
        thread.join(STOP_GRACE_S)
        if thread.is_alive():
            logger.warning("the run did not end within %.0f s of Ctrl-C", STOP_GRACE_S)
        raise
    if errors:
        raise errors[0]
    return results[0]


def _interrupt(thread: threading.Thread) -> None:
    """Raise KeyboardInterrupt in the thread, at its next Python instruction."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt)
        )
