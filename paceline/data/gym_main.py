"""Generates the prompts of a reasoning-gym task in a process of its own, run as a script.

Some tasks depend on the order of sets of texts, which is the same in every process only where
PYTHONHASHSEED is fixed at its start. This file imports nothing of Paceline.

One JSON line comes in on standard input: {"task", "params", "seed", "size"}. On standard output
go one line for each entry, or one line {"problem": ...}. A tuple is written as {"()": [...]} and
an object with other keys than texts as {"{}": [[key, value], ...]}, since the scorers of some
tasks tell tuples from lists.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from typing import Any


def packed(value: Any) -> Any:
    """A JSON value from which `unpacked` makes an equal one."""
    if isinstance(value, tuple):
        return {"()": [packed(v) for v in value]}
    if isinstance(value, list):
        return [packed(v) for v in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and value.keys().isdisjoint({"()", "{}"}):
            return {key: packed(v) for key, v in value.items()}
        return {"{}": [[packed(key), packed(v)] for key, v in value.items()]}
    if hasattr(value, "tolist"):
        return packed(value.tolist())
    return value


def unpacked(value: Any) -> Any:
    """The inverse of `packed`."""
    if isinstance(value, list):
        return [unpacked(v) for v in value]
    if isinstance(value, dict):
        if value.keys() == {"()"}:
            return tuple(unpacked(v) for v in value["()"])
        if value.keys() == {"{}"}:
            return {unpacked(key): unpacked(v) for key, v in value["{}"]}
        return {key: unpacked(v) for key, v in value.items()}
    return value


def problem(order: dict[str, Any], datasets: dict[str, Any]) -> str | None:
    """What is wrong with the order, or None."""
    task, params = order["task"], order["params"]
    if task == "composite":
        return 'task "composite" is not offered: list its tasks as several [[data.sources]]'
    if task not in datasets:
        near = difflib.get_close_matches(task, datasets, n=1)
        return f"no task {task!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    known = {field.name for field in dataclasses.fields(datasets[task][1])} - {"seed", "size"}
    for name in params:
        if name in ("seed", "size"):
            return f"{name} stands beside params, not in it"
        if name not in known:
            return f"task {task!r} has no parameter {name!r}; there is {', '.join(sorted(known))}"
    return None


def main() -> None:
    # Some tasks print while they generate.
    out, sys.stdout = sys.stdout, sys.stderr
    order = json.loads(sys.stdin.readline())
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    found = problem(order, DATASETS)
    if found is None:
        try:
            dataset = reasoning_gym.create_dataset(
                order["task"], seed=order["seed"], size=order["size"], **order["params"]
            )
        # The checks of a task's parameters raise all kinds.
        except Exception as error:
            found = f"task {order['task']!r}: {type(error).__name__}: {error}"
    if found is not None:
        out.write(json.dumps({"problem": found}) + "\n")
        return
    for index in range(order["size"]):
        out.write(json.dumps({"entry": packed(dataset[index])}) + "\n")


if __name__ == "__main__":
    main()
