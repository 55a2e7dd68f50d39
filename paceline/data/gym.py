"""Prompts of reasoning-gym tasks.

A prompt carries what the scorer of its task needs:

    metadata["reasoning_gym"] = {"task": "chain_sum", "params": {...}, "seed": 0, "size": 500,
                                 "index": 3, "entry": {"question", "answer", "metadata"}}
    reasoning_gym.create_dataset(task, seed=seed, size=size, **params).score_answer(text, entry)

`entry` is as the task made it, tuples included, which the scorers of some tasks tell from lists.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.data.gym_main import unpacked
from paceline.data.rows import RawRow
from paceline.data.sources import ReasoningGymSource
from paceline.errors import ConfigError, DataError, DeadlineError, MissingExtraError
from paceline.types import Prompt


def read_task(source: ReasoningGymSource) -> Iterator[RawRow]:
    """Generate the prompts of a task; their ids are `task-seed-index`.

    Raises:
        MissingExtraError: without the package `reasoning-gym`.
        ConfigError: if there is no such task or parameter.
        DataError: if the task fails.
        DeadlineError: if it takes longer than `source.timeout_s`.
    """
    if find_spec("reasoning_gym") is None:
        raise MissingExtraError(
            'a source of kind "reasoning_gym"', "reasoning-gym", "reasoning-gym"
        )
    order = {
        "task": source.task,
        "params": source.params,
        "seed": source.seed,
        "size": source.size,
    }
    for index, line in enumerate(_generate(order, source.timeout_s)):
        if "problem" in line:
            raise ConfigError(f"source {source.label!r}: {line['problem']}")
        entry = unpacked(line["entry"])
        prompt = Prompt(
            id=f"{source.task}-{source.seed}-{index}",
            text=entry["question"],
            answer=entry["answer"],
            metadata={"reasoning_gym": {**order, "index": index, "entry": entry}},
        )
        yield RawRow(f"{source.label}[{index}]", prompt)


def _generate(order: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    task = f"reasoning-gym task {order['task']!r}"
    script = Path(__file__).with_name("gym_main.py")
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(script)],
            input=json.dumps(order, default=str) + "\n",
            env={**os.environ, "PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(
            f"{task}: {order['size']} prompts were not there after {timeout_s} s: ask for fewer, "
            "or raise timeout_s"
        ) from error
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise DataError(f"{task} failed with exit code {done.returncode}:\n{tail}")
    return [json.loads(line) for line in done.stdout.splitlines()]
