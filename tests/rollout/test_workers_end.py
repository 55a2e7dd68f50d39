"""Worker processes that die, hang, are cancelled or closed, and those whose parent dies."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from reward_workers import LONG_S, VALUES, call_once, has_ended, pickled

from paceline.errors import ConfigError, RewardError
from paceline.rollout.score import Score
from paceline.rollout.scorers import ScorerOptions
from paceline.rollout.worker_protocol import BuiltinScorer, LocatedScorer
from paceline.rollout.workers import WorkerPool

FORKING = """
import os, signal, time

def score(completion, prompt):
    if completion == "42":
        return 1.0
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        if completion == "leave":
            os.setsid()
        os.write(told, b"x")
        time.sleep(1000)
    os.read(ready, 1)
    open(prompt, "w").write(str(pid))
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
"""


@pytest.mark.parametrize("completion", ["stay", "leave"])
def test_the_death_of_a_process_that_has_forked_is_seen_at_once(
    tmp_path: Path, completion: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.py").write_text(FORKING)
    note = tmp_path / "pid"

    async def run() -> tuple[Score, Score, float]:
        spec = LocatedScorer("r.py:score", str(tmp_path))
        pool = WorkerPool({"f": spec}, num_workers=1, timeout_s=LONG_S)
        try:
            await pool.start()
            start = time.monotonic()
            values = VALUES | {"completion": completion, "prompt": str(note)}
            died = await pool.call("f", values)
            return died, await pool.call("f", VALUES), time.monotonic() - start
        finally:
            await pool.aclose()

    try:
        died, fine, seconds = asyncio.run(run())
        assert (died.cause, died.detail) == ("crashed", "the process ended with signal 9")
        assert fine.value == 1.0
        assert seconds < LONG_S / 2
        # What left the process group is its own master.
        assert completion == "leave" or has_ended(int(note.read_text()))
    finally:
        if completion == "leave":
            os.kill(int(note.read_text()), signal.SIGKILL)
    gc.collect()
    assert capfd.readouterr().err == ""


def test_a_process_that_closes_its_pipes_is_told_by_its_own_exit_code() -> None:
    def score(completion: str) -> float:
        os.closerange(3, 20)
        os._exit(5)

    result = asyncio.run(call_once(score))
    assert (result.cause, result.detail) == ("crashed", "the process ended with exit code 5")


def test_a_crash_costs_one_call_and_the_pool_goes_on() -> None:
    def score(completion: str) -> float:
        if completion == "exit":
            os._exit(7)
        if completion == "signal":
            os.kill(os.getpid(), signal.SIGSEGV)
        return 1.0

    async def run() -> list[Score]:
        pool = WorkerPool({"f": pickled(score)}, num_workers=1, timeout_s=LONG_S)
        try:
            texts = ("exit", "fine", "signal", "fine")
            return [await pool.call("f", VALUES | {"completion": text}) for text in texts]
        finally:
            await pool.aclose()

    results = asyncio.run(run())
    assert [result.cause for result in results] == ["crashed", None, "crashed", None]
    assert "exit code 7" in results[0].detail
    assert "signal 11" in results[2].detail
    assert results[1].value == 1.0


def hang_if_asked(completion: str, prompt: str) -> float:
    if completion == "hang":
        child = subprocess.Popen(["sleep", "1000"])
        if os.path.isabs(prompt):
            Path(prompt).write_text(str(child.pid))
        while True:
            pass
    return 1.0


def test_a_hung_call_ends_with_all_it_started_and_its_process_is_replaced(tmp_path: Path) -> None:
    """Case 49."""
    note = tmp_path / "pid"

    async def run() -> tuple[Score, Score, list[int], list[int], float]:
        pool = WorkerPool({"f": pickled(hang_if_asked)}, num_workers=2, timeout_s=0.5)
        try:
            await pool.start()
            before = pool.pids
            start = time.monotonic()
            hung = await pool.call("f", VALUES | {"completion": "hang", "prompt": str(note)})
            seconds = time.monotonic() - start
            assert all(map(has_ended, before))
            fine = await pool.call("f", VALUES)
            return hung, fine, before, pool.pids, seconds
        finally:
            await pool.aclose()

    hung, fine, before, after, seconds = asyncio.run(run())
    assert (hung.value, hung.cause) == (None, "timeout")
    assert fine.value == 1.0
    assert len(before) == len(after) == 1
    assert before != after
    assert seconds < 5
    assert has_ended(int(note.read_text()))


@pytest.mark.slow
def test_after_ten_hung_calls_the_pool_has_its_size_and_nothing_is_left_behind() -> None:
    """Case 49."""

    async def run() -> None:
        pool = WorkerPool({"f": pickled(hang_if_asked)}, num_workers=2, timeout_s=0.5)
        try:
            hung = [pool.call("f", VALUES | {"completion": "hang"}) for _ in range(10)]
            fine = [pool.call("f", VALUES) for _ in range(4)]
            results = await asyncio.gather(*hung, *fine)
            assert [result.cause for result in results] == ["timeout"] * 10 + [None] * 4
            assert 1 <= len(pool.pids) <= 2
            assert await asyncio.gather(pool.call("f", VALUES), pool.call("f", VALUES))
            pids = pool.pids
            assert len(pids) <= 2
        finally:
            await pool.aclose()
        assert all(map(has_ended, pids))

    asyncio.run(run())


def test_cancelling_a_call_ends_its_process() -> None:
    async def run() -> None:
        pool = WorkerPool({"f": pickled(hang_if_asked)}, num_workers=1, timeout_s=LONG_S)
        await pool.start()
        pids = pool.pids
        call = asyncio.create_task(pool.call("f", VALUES | {"completion": "hang"}))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert all(map(has_ended, pids))
        assert (await pool.call("f", VALUES)).value == 1.0
        await pool.aclose()

    asyncio.run(run())


def test_closing_ends_all_processes_and_refuses_calls() -> None:
    async def run() -> None:
        pool = WorkerPool({"f": pickled(hang_if_asked)}, num_workers=1, timeout_s=LONG_S)
        await pool.start()
        pids = pool.pids
        running = asyncio.create_task(pool.call("f", VALUES | {"completion": "hang"}))
        await asyncio.sleep(0)
        await pool.aclose()
        await pool.aclose()
        with pytest.raises(RewardError, match="closed"):
            await running
        with pytest.raises(RewardError, match="closed"):
            await pool.call("f", VALUES)
        assert pool.pids == []
        assert all(map(has_ended, pids))

    asyncio.run(run())


def test_a_process_that_died_while_idle_is_replaced_without_a_failed_call() -> None:
    async def run() -> Score:
        pool = WorkerPool({"f": pickled(hang_if_asked)}, num_workers=1, timeout_s=LONG_S)
        try:
            await pool.start()
            (child,) = pool._children
            os.kill(child.pid, signal.SIGKILL)
            await child.exit_code()
            return await pool.call("f", VALUES)
        finally:
            await pool.aclose()

    assert asyncio.run(run()).value == 1.0


def test_processes_start_only_as_calls_need_them() -> None:
    async def run() -> None:
        pool = WorkerPool({"f": pickled(hang_if_asked)}, num_workers=4, timeout_s=LONG_S)
        assert pool.pids == []
        for _ in range(3):
            await pool.call("f", VALUES)
        assert len(pool.pids) == 1
        await pool.aclose()

    asyncio.run(run())


def test_a_file_of_the_user_is_imported_in_the_child_only(tmp_path: Path) -> None:
    (tmp_path / "own_reward_file.py").write_text(
        "import own_companion\n"
        "def score(completion, answer):\n"
        "    return own_companion.WORTH * (completion == answer)\n"
    )
    (tmp_path / "own_companion.py").write_text("WORTH = 3\n")

    async def run() -> Score:
        spec = LocatedScorer("own_reward_file.py:score", str(tmp_path))
        pool = WorkerPool({"f": spec}, num_workers=1, timeout_s=LONG_S)
        try:
            return await pool.call("f", VALUES)
        finally:
            await pool.aclose()

    assert asyncio.run(run()).value == 3.0
    assert "own_companion" not in sys.modules


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def score(completion, solution): return 0.0", "asks for 'solution'"),
        ("def other(completion): return 0.0", "no 'score'"),
        ("import nothing_of_this_name", "nothing_of_this_name"),
        ("1 / 0", "ZeroDivisionError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import os; os._exit(3)", "ended the process with exit code 3"),
    ],
)
def test_a_function_that_can_not_be_used_is_found_at_start(
    tmp_path: Path, source: str, message: str
) -> None:
    (tmp_path / "r.py").write_text(source)

    async def run() -> None:
        spec = LocatedScorer("r.py:score", str(tmp_path))
        pool = WorkerPool({"f": spec}, num_workers=1, timeout_s=LONG_S)
        try:
            await pool.start()
        finally:
            assert pool.pids == []
            await pool.aclose()

    with pytest.raises(ConfigError, match=message) as caught:
        asyncio.run(run())
    assert "worker_main.py" not in str(caught.value)
    assert "user_code.py" not in str(caught.value)


def test_a_hostile_pattern_is_ended_at_the_limit() -> None:
    async def run() -> Score:
        spec = BuiltinScorer("regex", ScorerOptions(pattern="(a+)+$"))
        pool = WorkerPool({"f": spec}, num_workers=1, timeout_s=0.5)
        try:
            return await pool.call("f", VALUES | {"completion": "a" * 40 + "b"})
        finally:
            await pool.aclose()

    assert asyncio.run(run()).cause == "timeout"


def test_large_values_pass() -> None:
    result = asyncio.run(call_once(lambda completion: len(completion), completion="x" * 3_000_000))
    assert result.value == 3_000_000


def test_values_that_can_not_be_sent_cost_one_call() -> None:
    async def run() -> list[str | None]:
        pool = WorkerPool({"f": pickled(hang_if_asked)}, num_workers=1, timeout_s=LONG_S)
        try:
            bad = await pool.call("f", VALUES | {"answer": (i for i in range(3))})
            return [bad.cause, (await pool.call("f", VALUES)).cause]
        finally:
            await pool.aclose()

    assert asyncio.run(run()) == ["unpicklable", None]


PARENT = """
import asyncio, sys
from paceline.rollout.worker_protocol import LocatedScorer
from paceline.rollout.workers import WorkerPool

async def main():
    pool = WorkerPool({"f": LocatedScorer("r.py:score", sys.argv[1])}, num_workers=2, timeout_s=600)
    names = ("completion", "prompt", "answer", "metadata", "messages", "finish", "num_tokens")
    await asyncio.gather(*(pool.call("f", dict.fromkeys(names, "")) for _ in range(2)))

asyncio.run(main())
"""


HANGING_REWARD = """
import os, pathlib
def score(completion):
    with open(pathlib.Path(__file__).parent / "running", "w") as running:
        running.write(f"{os.getpid()}\\n")
    while True:
        pass
"""


@pytest.mark.slow
def test_workers_in_the_middle_of_a_call_die_with_a_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(HANGING_REWARD)
    (tmp_path / "parent.py").write_text(PARENT)
    os.mkfifo(tmp_path / "running")
    root = str(Path(__file__).parents[2])
    command = [sys.executable, str(tmp_path / "parent.py"), str(tmp_path)]
    parent = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": root})
    pids: list[int] = []
    try:
        while len(pids) < 2:
            with open(tmp_path / "running") as running:
                pids += [int(line) for line in running]
        for pid in pids:
            os.kill(pid, 0)
    finally:
        parent.kill()
        parent.wait(timeout=30)
    assert all(map(has_ended, pids))
