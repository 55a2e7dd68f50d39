from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reward_workers import LONG_S, VALUES, call_once, pickled

from paceline.rollout.score import Score
from paceline.rollout.worker_protocol import LocatedScorer, frame
from paceline.rollout.workers import WorkerPool

"""A limit that a test never reaches."""


def test_a_closure_runs_by_value_in_another_process() -> None:
    factor = 0.5

    def score(completion: str, answer: str) -> float:
        return factor * (completion == answer) + (os.getpid() == parent)

    parent = os.getpid()
    assert asyncio.run(call_once(score)).value == 0.5


def test_async_functions_run() -> None:
    async def score(completion: str) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"a": 1.0, "b": float(completion)}

    result = asyncio.run(call_once(score))
    assert (result.value, result.parts) == (43.0, {"a": 1.0, "b": 42.0})


def test_user_output_does_not_reach_the_pipe(capfd: pytest.CaptureFixture[str]) -> None:
    def score(completion: str) -> float:
        print("hello from the reward")
        os.write(1, b"raw\n")
        assert sys.stdin.read() == ""
        return 1.0

    assert asyncio.run(call_once(score)).value == 1.0
    out, err = capfd.readouterr()
    assert out == ""
    assert "hello from the reward" in err
    assert "raw" in err


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("as_json", [False, True])
def test_what_a_function_sends_in_place_of_its_score_is_not_run(
    tmp_path: Path, as_json: bool
) -> None:
    body = b"[1, 2]" if as_json else pickle.dumps(Payload(str(tmp_path / "ran")))
    forged = frame(2, body)

    def score(completion: str) -> float:
        for handle in range(3, 20):
            with contextlib.suppress(OSError):
                os.write(handle, forged)
        return 1.0

    result = asyncio.run(call_once(score))
    assert (result.value, result.cause) == (None, "crashed")
    assert "sent no score" in result.detail
    assert not (tmp_path / "ran").exists()


def test_exceptions_are_scores_with_the_users_line() -> None:
    def score(completion: str) -> float:
        return 1 / 0

    result = asyncio.run(call_once(score))
    assert (result.value, result.cause) == (None, "ZeroDivisionError")
    assert "division by zero" in result.detail.partition("\n")[0]
    assert "test_workers.py" in result.detail
    assert "return 1 / 0" in result.detail
    assert "worker_main" not in result.detail


def test_exceptions_of_async_functions_name_the_users_line_too() -> None:
    async def score(completion: str) -> float:
        raise LookupError("no judge")

    result = asyncio.run(call_once(score))
    assert result.cause == "LookupError"
    assert "in score" in result.detail.partition("\n")[0]
    assert "asyncio" not in result.detail


def test_leaving_the_process_by_sys_exit_is_an_exception() -> None:
    assert asyncio.run(call_once(lambda completion: sys.exit(3))).cause == "SystemExit"


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_a_function_raises_is_told_by_its_name(
    error: type[BaseException], is_async: bool
) -> None:
    def score(completion: str) -> float:
        raise error("stop")

    async def later(completion: str) -> float:
        raise error("stop")

    async def run() -> list[Score]:
        function = later if is_async else score
        pool = WorkerPool({"f": pickled(function)}, num_workers=1, timeout_s=LONG_S)
        try:
            await pool.start()
            before = pool.pids
            results = [await pool.call("f", VALUES) for _ in range(2)]
            assert pool.pids == before
            return results
        finally:
            await pool.aclose()

    for result in asyncio.run(run()):
        assert (result.value, result.cause) == (None, error.__name__)
        assert "in later" in result.detail or "in score" in result.detail


def fork_and(ending: str) -> Callable[[str], float]:
    def score(completion: str) -> float:
        if os.fork() == 0:
            match ending:
                case "exit":
                    sys.exit(0)
                case "raise":
                    raise KeyboardInterrupt
        return float(len(completion))

    return score


@pytest.mark.parametrize("ending", ["return", "raise", "exit"])
def test_a_function_that_forks_scores_each_answer_with_its_own_reward(ending: str) -> None:
    async def run() -> list[float | None]:
        pool = WorkerPool({"f": pickled(fork_and(ending))}, num_workers=1, timeout_s=LONG_S)
        try:
            texts = ["x" * count for count in range(1, 9)]
            scores = [await pool.call("f", VALUES | {"completion": text}) for text in texts]
            return [score.value for score in scores]
        finally:
            await pool.aclose()

    assert asyncio.run(run()) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


@pytest.mark.parametrize("place", ["import", "unpickling"])
def test_the_child_of_a_fork_outside_of_the_call_does_not_answer(
    tmp_path: Path, place: str
) -> None:
    (tmp_path / "r.py").write_text(
        "import os\n"
        f"if {place == 'import'}:\n    os.fork()\n"
        "def score(completion):\n    return float(len(completion))\n"
    )

    class Forking:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.fork, ()) if place == "unpickling" else (str, ())

    async def run() -> list[float | None]:
        spec = LocatedScorer("r.py:score", str(tmp_path))
        pool = WorkerPool({"f": spec}, num_workers=1, timeout_s=LONG_S)
        try:
            texts = [{"completion": "x" * count, "answer": Forking()} for count in range(1, 5)]
            return [(await pool.call("f", VALUES | text)).value for text in texts]
        finally:
            await pool.aclose()

    assert asyncio.run(run()) == [1.0, 2.0, 3.0, 4.0]


def test_a_reply_to_another_call_is_a_crash_and_the_process_is_replaced() -> None:
    body = b'{"value": 9.0}'
    late, extra = frame(1, body), frame(2, body)

    def score(completion: str) -> float:
        if completion == "forge":
            for handle in range(3, 20):
                with contextlib.suppress(OSError):
                    os.write(handle, late)
        if completion == "twice":
            for handle in range(3, 20):
                with contextlib.suppress(OSError):
                    os.write(handle, extra)
        return 1.0

    async def run() -> list[tuple[float | None, str | None]]:
        pool = WorkerPool({"f": pickled(score)}, num_workers=1, timeout_s=LONG_S)
        try:
            texts = ("forge", "fine", "fine", "fine")
            scores = [await pool.call("f", VALUES | {"completion": text}) for text in texts]
            scores += [await other.call("f", VALUES | {"completion": t}) for t in ("twice", "fine")]
            return [(score.value, score.cause) for score in scores]
        finally:
            await pool.aclose()
            await other.aclose()

    other = WorkerPool({"f": pickled(score)}, num_workers=1, timeout_s=LONG_S)
    results = asyncio.run(run())
    assert results[:4] == [(None, "crashed"), (1.0, None), (1.0, None), (1.0, None)]
    # The forged one has the number of its call: nothing tells it apart. The next call finds out.
    assert results[4:] == [(9.0, None), (None, "crashed")]
