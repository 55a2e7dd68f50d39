"""Every wait of the package has a time limit, or says beside it who ends it: `# ends: ...`.

A limit is a `timeout` of the call or an `asyncio.timeout` block around it. The comment stands on
the line of the wait, or in the comment lines just above its statement.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "paceline"
FILES = sorted(PACKAGE.rglob("*.py"))
MARK = re.compile(r"# ends: \S.+")

# Dotted name -> how many positional values it has when one of them is the limit; 0: none ever is.
FUNCTIONS = {
    "asyncio.wait": 0,
    "asyncio.wait_for": 2,
    "asyncio.gather": 0,
    "asyncio.as_completed": 0,
    "asyncio.TaskGroup": 0,
    "concurrent.futures.wait": 2,
    "concurrent.futures.as_completed": 2,
    "os.wait": 0,
    "os.waitpid": 0,
    "os.waitid": 0,
    "ray.get": 0,
    "ray.wait": 0,
    "select.select": 4,
    "signal.pause": 0,
    "signal.sigwait": 0,
    "socket.create_connection": 2,
    "subprocess.call": 0,
    "subprocess.check_call": 0,
    "subprocess.check_output": 0,
    "subprocess.run": 0,
    "urllib.request.urlopen": 3,
}
# Methods that wait when called with these numbers of positional values, none of them a limit.
METHODS = {
    "acquire": (0,),
    "communicate": (0, 1),
    "get": (0,),
    "join": (0,),
    "shutdown": (0,),
    "wait": (0,),
    "wait_for": (1,),
    "waitpid": (0,),
}
AWAITED_METHODS = {"drain", "put", "read", "readexactly", "readline", "readuntil"}
"""These wait in their asynchronous form only."""
RESULT_BLOCKS_WITH = {"submit", "run_coroutine_threadsafe"}
"""Calls whose futures block the thread in `result()`."""


def dotted(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def has_limit(call: ast.Call, num_with_limit: int = 0) -> bool:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if "timeout" in given:
        return not is_none(given["timeout"])
    if any(is_false(given[name]) for name in ("block", "blocking", "wait") if name in given):
        return True
    return 0 < num_with_limit <= len(call.args) and not is_none(call.args[num_with_limit - 1])


def is_timeout(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and dotted(node.func) in ("asyncio.timeout", "asyncio.timeout_at")
        and not is_none(node.args[0])
    )


class Waits(ast.NodeVisitor):
    """Collects the waits without a limit as (line, line of the statement, text)."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[tuple[int, int, str]] = []
        self._statement_line = 0
        self._is_limited = False
        self._limits: set[str] = set()
        self._awaited: set[ast.expr] = set()
        called = {n.func for n in ast.walk(tree) if isinstance(n, ast.Call)}
        names = {f.attr for f in called if isinstance(f, ast.Attribute)}
        self._results_block = bool(names & RESULT_BLOCKS_WITH)
        self.visit(tree)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self._statement_line = node.lineno
        super().visit(node)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        before = self._is_limited, self._limits
        self._is_limited = False
        assigned = [n for n in ast.walk(node) if isinstance(n, ast.Assign)]
        self._limits = {dotted(t) for n in assigned if is_timeout(n.value) for t in n.targets}
        self.generic_visit(node)
        self._is_limited, self._limits = before

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _visit_function

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        before = self._is_limited
        for item in node.items:
            self.visit(item.context_expr)
            if is_timeout(item.context_expr) or dotted(item.context_expr) in self._limits:
                self._is_limited = True
            elif isinstance(item.context_expr, ast.Name | ast.Attribute):
                self._add(item.context_expr)
        for statement in node.body:
            self.visit(statement)
        self._is_limited = before

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            name = dotted(item.context_expr).rpartition(".")[2]
            if re.search("lock|condition|semaphore", name, re.IGNORECASE):
                self._add(item.context_expr)
        self.generic_visit(node)

    def visit_Await(self, node: ast.Await) -> None:
        if not isinstance(node.value, ast.Call):
            self._add(node)
        else:
            self._awaited.add(node.value)
            name = dotted(node.value.func)
            waits = name == "asyncio.shield" or name.rpartition(".")[2] in AWAITED_METHODS
            if waits and not has_limit(node.value):
                self._add(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = dotted(node.func)
        if name in FUNCTIONS:
            if not has_limit(node, FUNCTIONS[name]):
                self._add(node)
        elif name in ("fcntl.flock", "fcntl.lockf"):
            if "LOCK_NB" not in ast.unparse(node) and "LOCK_UN" not in ast.unparse(node):
                self._add(node)
        elif isinstance(node.func, ast.Attribute):
            self._check_method(node, node.func.attr)
        before = self._is_limited
        self._is_limited |= name == "asyncio.wait_for" and has_limit(node, 2)
        self.generic_visit(node)
        self._is_limited = before

    def _check_method(self, node: ast.Call, method: str) -> None:
        waits = method in METHODS and len(node.args) in METHODS[method] and not has_limit(node)
        if waits or (method == "result" and self._results_block and not node.args):
            self._add(node)

    def _add(self, node: ast.expr) -> None:
        # A limit of the event loop does not end what blocks the loop.
        is_call = isinstance(node, ast.Call) and node not in self._awaited
        blocks = is_call and not ast.unparse(node).startswith("asyncio.")
        if blocks or not self._is_limited:
            self.found.append((node.lineno, self._statement_line, ast.unparse(node)))


def marks_of(source: str) -> tuple[set[int], set[int]]:
    """Lines with a comment that names who ends a wait, and lines that are nothing but comment."""
    marks, comments = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if MARK.match(token.string):
                marks.add(token.start[0])
            if token.line.strip() == token.string:
                comments.add(token.start[0])
    return marks, comments


def faults(source: str) -> list[str]:
    marks, comments = marks_of(source)
    used: set[int] = set()
    unmarked = []
    for line, statement, text in Waits(ast.parse(source)).found:
        places = {line, statement}
        above = statement - 1
        while above in comments:
            places.add(above)
            above -= 1
        used |= places & marks
        if not places & marks:
            unmarked.append(f"{line}: {text}: no time limit, and no `# ends: ...` beside it")
    return unmarked + [f"{line}: `# ends: ...` beside no wait" for line in sorted(marks - used)]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_wait_has_a_limit_or_names_who_ends_it(path: Path) -> None:
    assert faults(path.read_text()) == []


@pytest.mark.parametrize(
    "wait",
    [
        "await asyncio.wait(tasks)",
        "await asyncio.wait(tasks, timeout=None)",
        "await asyncio.wait_for(task, None)",
        "await asyncio.gather(a(), b())",
        "await event.wait()",
        "await condition.wait_for(ready)",
        "await queue.get()",
        "await queue.put(1)",
        "await future",
        "await asyncio.shield(future)",
        "async with asyncio.timeout(3): thread.join()",
        "await self.task",
        "await stream.readexactly(8)",
        "await writer.drain()",
        "await process.communicate(data)",
        "inbox.get()",
        "thread.join()",
        "lock.acquire()",
        "process.wait()",
        "pool.shutdown()",
        "pool.submit(f).result()",
        "subprocess.run(command)",
        "ray.get(reference)",
        "fcntl.flock(handle, fcntl.LOCK_EX)",
        "async with slots: pass",
        "async with asyncio.TaskGroup() as group: pass",
        "with self._lock: pass",
    ],
)
def test_a_wait_without_a_limit_is_found(wait: str) -> None:
    def source(line: str) -> str:
        return f"async def f():\n    {line}\n"

    assert len(faults(source(wait))) == 1
    assert faults(source(f"{wait}  # ends: when the process does")) == []
    assert faults(source(f"# ends: when the process does,\n    # as ever\n    {wait}")) == []
    assert faults(source(f"{wait}  # ends:")) != []
    assert faults(source(f"# ends: long ago\n    pass\n    {wait}")) != []


@pytest.mark.parametrize(
    "line",
    [
        "await asyncio.wait(tasks, timeout=limit_s)",
        "await asyncio.wait_for(task, 3)",
        "await asyncio.wait_for(asyncio.gather(a(), b()), 3)",
        "await own_function()",
        "inbox.get(timeout=3)",
        "table.get('key')",
        "', '.join(words)",
        "thread.join(3)",
        "lock.acquire(timeout=3)",
        "lock.acquire(blocking=False)",
        "pool.shutdown(wait=False)",
        "task.result()",
        "subprocess.run(command, timeout=3)",
        "async with asyncio.timeout(3): await future",
        "limit = asyncio.timeout(3)\n    async with limit: await event.wait()",
        "async with open_it() as it: pass",
        "with suppress(ValueError): pass",
        "file.read()",
    ],
)
def test_other_lines_are_left_alone(line: str) -> None:
    assert faults(f"async def f():\n    {line}\n") == []


def test_a_limit_does_not_reach_into_functions_made_under_it() -> None:
    source = "async def f():\n    async with asyncio.timeout(3):\n        {}\n"
    inner = "async def g():\n            await future"
    assert faults(source.format("await future")) == []
    assert len(faults(source.format(inner))) == 1


def test_a_comment_beside_no_wait_is_stale() -> None:
    assert faults("# ends: soon\nx = 1\n") == ["1: `# ends: ...` beside no wait"]
