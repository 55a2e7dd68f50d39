"""Server processes: started, waited for, ended however their parent ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.engines.http import JsonClient, LostServerError
from paceline.engines.server import (
    HOST,
    PORT,
    SECOND_PORT,
    LocalLauncher,
    Server,
    ServerCommand,
    last_words,
    wait_until_healthy,
)
from paceline.errors import EngineError

SERVER = str(Path(__file__).with_name("sglang_server.py"))
STAND_IN = (sys.executable, SERVER, HOST, PORT)


def command(*argv: str, **changes: Any) -> ServerCommand:
    return ServerCommand("policy-server-0", argv, **changes)


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def run(work: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(main())


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def eventually(holds: Callable[[], bool], what: str, within_s: float = 15.0) -> None:
    until = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.02)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def end_of(server: Server) -> str:
    while (end := await server.ended()) is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return end


def test_what_stands_for_host_and_ports(tmp_path: Path) -> None:
    async def main() -> None:
        server = await LocalLauncher(tmp_path).start(
            command(*python("import sys; print(*sys.argv[1:])"), HOST, "--p=" + PORT, SECOND_PORT)
        )
        await end_of(server)
        host, first, second = (await server.last_output()).split()
        assert f"http://{host}:{first.removeprefix('--p=')}" == server.url
        assert int(second) > 0
        await server.aclose()

    run(main())


async def written(path: Path, count: int = 1) -> list[int]:
    """Numbers that processes of a test wrote into a file, one a line."""
    await until(lambda: path.exists() and path.read_text().count("\n") >= count)
    return [int(line) for line in path.read_text().split()]


def test_a_server_is_started_waited_for_and_ended(tmp_path: Path) -> None:
    async def work() -> None:
        server = await LocalLauncher(tmp_path).start(command(*STAND_IN))
        client = JsonClient()
        await wait_until_healthy(
            server,
            lambda: client.request(server.url, "/health_generate", timeout_s=5),
            name="server",
            timeout_s=30,
        )
        assert server.url.startswith("http://127.0.0.1:")
        assert "serving as process" in await server.last_output()
        assert await server.ended() is None
        await server.aclose()
        await server.aclose()
        assert await server.ended() is not None
        with pytest.raises(LostServerError):
            await client.request(server.url, "/health_generate", timeout_s=5)
        await client.aclose()

    run(work())
    assert (tmp_path / "policy-server-0.log").exists()


def test_a_server_gets_its_environment_and_its_devices(tmp_path: Path) -> None:
    async def devices(launcher: LocalLauncher, **changes: Any) -> str:
        show = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('OWN'))"
        server = await launcher.start(command(*python(show), **changes))
        await end_of(server)
        await server.aclose()
        return (await server.last_output()).strip()

    async def work() -> None:
        launcher = LocalLauncher(tmp_path)
        assert (await devices(launcher, env={"OWN": "x"})).endswith(" x")
        assert (await devices(launcher, replica=1, num_devices=2)).startswith("2,3 ")
        some = LocalLauncher(tmp_path, devices=("4", "7"))
        assert (await devices(some, replica=1, num_devices=1)).startswith("7 ")
        with pytest.raises(EngineError, match="needs GPUs 2 to 3 of this machine's"):
            await some.start(command("true", replica=1, num_devices=2))

    run(work())


def test_the_error_is_the_servers_own(tmp_path: Path) -> None:
    code = "print('loading'); raise ValueError('no such attention backend')"

    async def work() -> None:
        server = await LocalLauncher(tmp_path).start(command(*python(code)))
        with pytest.raises(
            EngineError, match="ended with 1 before it was ready: ValueError: no such attention"
        ):
            await wait_until_healthy(server, _never, name="server", timeout_s=30)
        await server.aclose()

    run(work())


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    async def work() -> None:
        server = await LocalLauncher(tmp_path).start(command("/nowhere/python", "-m", "x"))
        with pytest.raises(EngineError, match="'/nowhere/python' can not be started") as caught:
            await wait_until_healthy(server, _never, name="server", timeout_s=30)
        assert "Set engine.python to" in str(caught.value)
        await server.aclose()

    run(work())


def test_an_interpreter_without_the_server(tmp_path: Path) -> None:
    async def work() -> None:
        code = "raise ModuleNotFoundError(\"No module named 'sglang'\")"
        server = await LocalLauncher(tmp_path).start(command(*python(code)))
        with pytest.raises(EngineError, match=r"(?s)No module named 'sglang'.*Set engine\.python"):
            await wait_until_healthy(server, _never, name="server", timeout_s=30)
        await server.aclose()

    run(work())


def test_only_the_newest_start_is_quoted(tmp_path: Path) -> None:
    async def work() -> None:
        for word in ("first", "second"):
            server = await LocalLauncher(tmp_path).start(command(*python(f"print('{word}')")))
            await end_of(server)
            assert (await server.last_output()).strip() == word
            await server.aclose()

    run(work())


def test_waiting_for_health_has_a_limit_and_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        code = "import time; print('loading layer 7', flush=True); time.sleep(60)"
        server = await LocalLauncher(tmp_path).start(command(*python(code)))
        with pytest.raises(EngineError, match=r"within 1 s \(engine.start_timeout_s\)") as caught:
            await wait_until_healthy(server, _never, name="server", timeout_s=1)
        assert "loading layer 7" in str(caught.value)
        await server.aclose()

    monkeypatch.setattr("paceline.engines.server.PROGRESS_S", 0.3)
    monkeypatch.setattr("paceline.engines.server.LOOK_S", 0.05)
    with caplog.at_level(logging.INFO):
        run(work())
    assert "has been starting for" in caplog.text


async def _never() -> None:
    raise LostServerError("not there")


FAMILY = """
import os, subprocess, sys, time
def note(): print(os.getpid(), file=open(sys.argv[1], "a"), flush=True)
note()
if len(sys.argv) > 2:
    # One in a session of its own, which signals to the process group do not reach.
    subprocess.Popen([sys.executable, __file__, sys.argv[1]], start_new_session=True)
while True: time.sleep(1)
"""


@pytest.fixture
def family(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A program that starts another one, and the file in which both note who they are."""
    program, notes = tmp_path / "family.py", tmp_path / "notes"
    program.write_text(FAMILY)
    yield program, notes
    for pid in notes.read_text().split() if notes.exists() else ():
        if is_alive(int(pid)):
            os.kill(int(pid), signal.SIGKILL)


def test_all_that_a_server_started_ends_with_it(tmp_path: Path, family: tuple[Path, Path]) -> None:
    program, notes = family

    async def work() -> None:
        argv = (sys.executable, str(program), str(notes), "parent")
        server = await LocalLauncher(tmp_path).start(command(*argv))
        pids = await written(notes, 2)
        assert all(map(is_alive, pids))
        await server.aclose()
        assert not any(map(is_alive, pids))

    run(work())


def test_a_server_that_is_killed_takes_its_children_along(
    tmp_path: Path, family: tuple[Path, Path]
) -> None:
    program, notes = family

    async def work() -> None:
        argv = (sys.executable, str(program), str(notes), "parent")
        server = await LocalLauncher(tmp_path).start(command(*argv))
        parent, child = await written(notes, 2)
        os.kill(parent, signal.SIGKILL)
        assert await end_of(server) == "was ended by signal 9"
        assert not is_alive(child)
        await server.aclose()

    run(work())


DRIVER = """
import asyncio, signal, sys
# A shell that runs the tests in the background lets its children ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from paceline.engines.server import LocalLauncher, ServerCommand
async def main():
    argv = (sys.executable, sys.argv[1], sys.argv[2], "parent")
    await LocalLauncher(Path(sys.argv[3])).start(ServerCommand("server", argv))
    await asyncio.sleep(100)
asyncio.run(main())
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_a_driver_that_ends(
    tmp_path: Path, family: tuple[Path, Path], end: signal.Signals
) -> None:
    program, notes = family
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(program), str(notes), str(tmp_path)],
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: notes.exists() and notes.read_text().count("\n") == 2, "no family")
        pids = [int(pid) for pid in notes.read_text().split()]
        driver.send_signal(end)
        driver.wait(timeout=10)
        eventually(lambda: not any(map(is_alive, pids)), f"alive: {pids}")
    finally:
        driver.kill()
        driver.wait(timeout=10)


def test_last_words() -> None:
    output = (
        "[2026-01-01 10:00:00] loading\n"
        "Traceback (most recent call last):\n"
        '  File "x.py", line 1, in f\n'
        "torch.OutOfMemoryError: CUDA out of memory\n"
        "\n"
        "[2026-01-01 10:00:01] Received sigquit from a child process.\n"
    )
    told = last_words(output)
    assert told.startswith("torch.OutOfMemoryError: CUDA out of memory\n")
    assert told.endswith("Received sigquit from a child process.")
    assert last_words("usage: x\nx.py: error: unrecognized arguments: --y\n").startswith(
        "x.py: err"
    )
    assert last_words("") == "it wrote nothing"
