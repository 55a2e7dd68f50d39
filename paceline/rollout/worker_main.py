"""The child process that runs users' functions: `python -P -m paceline.rollout.worker_main PID`.

Its parent is `workers.WorkerPool`. Output of user code goes to stderr. It dies with its parent:
by the kernel on Linux, and by the end of stdin everywhere.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import inspect
import json
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, BinaryIO

import cloudpickle

from paceline import user_code
from paceline.errors import PacelineError
from paceline.rollout.score import Score, exception_score, to_score
from paceline.rollout.scorers import make_scorer
from paceline.rollout.worker_protocol import (
    HEAD,
    REWARD_NAMES,
    BuiltinScorer,
    Call,
    Load,
    LocatedScorer,
    PickledScorer,
    ScorerSpec,
    frame,
)
from paceline.user_code import add_to_path, load_callable, read_signature

PR_SET_PDEATHSIG = 1
OWN_FILES = frozenset(
    {__file__, user_code.__file__, asyncio.runners.__file__, asyncio.base_events.__file__}
)

Values = Mapping[str, Any]


def main() -> None:
    _die_with_parent(int(sys.argv[1]))
    requests, replies = _take_pipes()
    own_pid = os.getpid()
    inbox: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, inbox), daemon=True).start()
    scorers: dict[str, Callable[[Values], Score]] = {}
    with asyncio.Runner() as loop:
        while True:
            number, body = inbox.get()  # ends: the reader thread ends the process with its parent
            try:
                message = pickle.loads(body)
            # Unpickling imports code of the user, which may raise anything.
            except BaseException as exc:
                message, reply = None, dataclasses.asdict(exception_score(exc, OWN_FILES, 0.0))
            match message:
                case Load():
                    reply = {"error": _load(message, scorers, loop)}
                case Call(scorer, values):
                    reply = dataclasses.asdict(scorers[scorer](values))
            if os.getpid() != own_pid:
                # User code has forked, and this is the child: the pipe is its parent's.
                os._exit(1 if reply.get("cause") or reply.get("error") else 0)
            replies.write(frame(number, json.dumps(reply).encode()))
            replies.flush()


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The two pipes to the parent. User code finds an empty stdin, and stderr as its stdout."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return requests, replies


def _receive(requests: BinaryIO, inbox: queue.SimpleQueue[tuple[int, bytes]]) -> None:
    while len(head := requests.read(HEAD.size)) == HEAD.size:
        number, length = HEAD.unpack(head)
        inbox.put((number, requests.read(length)))
    os._exit(0)


def _load(
    message: Load, scorers: dict[str, Callable[[Values], Score]], loop: asyncio.Runner
) -> str | None:
    """Make scorers ready; the text of what went wrong, if anything."""
    add_to_path(message.path)
    for name, spec in message.scorers.items():
        try:
            scorers[name] = _make(spec, loop)
        except PacelineError as exc:
            return str(exc)
        except BaseException as exc:
            return f"{_label(spec)} can not be loaded: {exception_text(exc)}"
    return None


def _make(spec: ScorerSpec, loop: asyncio.Runner) -> Callable[[Values], Score]:
    match spec:
        case BuiltinScorer(kind, options):
            scorer = make_scorer(kind, options)

            def call(values: Values) -> Any:
                return scorer(values["completion"], values["answer"], values["metadata"])

            return lambda values: _timed(call, values, {}, loop)
        case LocatedScorer(location, base, weights):
            function = load_callable(location, Path(base))
        case PickledScorer(data, _, weights, file):
            function = cloudpickle.loads(data)
            if file is not None:
                _name_file(function, file)
    signature = read_signature(function, REWARD_NAMES, _label(spec))

    def call_function(values: Values) -> Any:
        positional, keywords = signature.bind(values)
        return function(*positional, **keywords)

    return lambda values: _timed(call_function, values, weights, loop)


def _name_file(function: Any, file: str) -> None:
    """Give a function, and those of its module that came with it, their file back."""
    namespace = getattr(function, "__globals__", {})
    for found in (function, *namespace.values()):
        is_own = getattr(found, "__module__", None) == getattr(function, "__module__", "")
        if isinstance(found, FunctionType) and is_own:
            found.__code__ = _code_of(found.__code__, file)


def _code_of(code: CodeType, file: str) -> CodeType:
    inner = (_code_of(c, file) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_filename=file, co_consts=tuple(inner))


def _timed(
    call: Callable[[Values], Any],
    values: Values,
    weights: Mapping[str, float],
    loop: asyncio.Runner,
) -> Score:
    start = time.perf_counter()
    try:
        result = call(values)
        if inspect.isawaitable(result):
            result = loop.run(_wait_for(result))
    # User code may raise anything, `SystemExit` and `KeyboardInterrupt` too: the answer is then a
    # failed one. Ctrl-C itself does not come here: this process has a session of its own.
    except BaseException as exc:
        return exception_score(exc, OWN_FILES, time.perf_counter() - start)
    return to_score(result, weights, time.perf_counter() - start)


async def _wait_for(result: Awaitable[Any]) -> Any:
    return await result  # ends: the parent kills this process at the time limit


def _label(spec: ScorerSpec) -> str:
    match spec:
        case BuiltinScorer(kind):
            return f"reward kind {kind!r}"
        case LocatedScorer(location):
            return f"reward function {location!r}"
        case PickledScorer(label=label):
            return f"reward function {label}"


def exception_text(exc: BaseException) -> str:
    """The traceback from the user's first line on; without such a line, the exception alone."""
    tb = exc.__traceback__
    while tb is not None and _is_own_frame(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return "".join(traceback.format_exception(type(exc), exc, tb)).rstrip()


def _is_own_frame(file: str) -> bool:
    return file in OWN_FILES or file.startswith("<frozen importlib")


if __name__ == "__main__":
    main()
