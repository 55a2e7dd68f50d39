"""Calls of a reward in worker processes, for tests."""

from __future__ import annotations

import inspect
import os
import select
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle

from paceline.rollout.score import Score
from paceline.rollout.worker_protocol import PickledScorer
from paceline.rollout.workers import WorkerPool

VALUES: dict[str, Any] = {
    "completion": "42",
    "prompt": "40+2=",
    "answer": "42",
    "metadata": {},
    "messages": [],
    "finish": "stop",
    "num_tokens": 2,
}


LONG_S = 60.0


def pickled(function: Callable[..., Any]) -> PickledScorer:
    """The function by value, as a user's script would hand it over."""
    module = sys.modules[function.__module__]
    cloudpickle.register_pickle_by_value(module)
    try:
        dumped = cloudpickle.dumps(function)
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    return PickledScorer(dumped, "f", file=inspect.getfile(function))


async def call_once(
    function: Callable[..., Any], timeout_s: float = LONG_S, **values: Any
) -> Score:
    pool = WorkerPool({"f": pickled(function)}, num_workers=1, timeout_s=timeout_s)
    try:
        return await pool.call("f", VALUES | values)
    finally:
        await pool.aclose()


def has_ended(pid: int) -> bool:
    """True once the process is dead, whether buried or not; waits for a while."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(20_000))
    finally:
        os.close(handle)
