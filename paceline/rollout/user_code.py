"""Functions of the user: finding them by file or module, and calling them with what they declare.

Standard library only: the worker processes of `workers` import this.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import ConfigError

REWARD_NAMES = ("completion", "prompt", "answer", "metadata", "messages", "finish", "num_tokens")
"""What a reward function may ask for."""


@dataclass(frozen=True, slots=True)
class Signature:
    """How to call a function with the values it declares."""

    positional: tuple[str, ...]
    keywords: tuple[str, ...]
    takes_all: bool

    def bind(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword values for a call."""
        keywords = {name: values[name] for name in self.keywords}
        if self.takes_all:
            known = (*self.positional, *self.keywords)
            keywords |= {name: value for name, value in values.items() if name not in known}
        return [values[name] for name in self.positional], keywords


def read_signature(function: Callable[..., Any], allowed: Iterable[str], what: str) -> Signature:
    """How to call `function` with values named `allowed`.

    Raises ConfigError if it asks for anything else without a default.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as exc:
        raise ConfigError(
            f"{what}: its parameters can not be read ({exc}); wrap it in a function "
            f"that declares some of {', '.join(allowed)}"
        ) from exc
    names = tuple(allowed)
    positional: list[str] = []
    keywords: list[str] = []
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name not in names:
            if parameter.default is parameter.empty:
                raise ConfigError(_unknown_parameter(parameter.name, names, what))
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(parameter.name)
        else:
            keywords.append(parameter.name)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return Signature(tuple(positional), tuple(keywords), takes_all)


def load_callable(location: str, base: Path) -> Callable[..., Any]:
    """What `file.py:name` or `module:name` names. A class is made into an object.

    Files are looked up relative to `base`. Raises ConfigError if there is no such thing;
    exceptions of the user's own code pass through.
    """
    source, name = split_location(location)
    module = _load_file(base, source) if source.endswith(".py") else _load_module(base, source)
    try:
        found = getattr(module, name)
    except AttributeError:
        raise ConfigError(_no_such_name(name, source, dir(module))) from None
    if inspect.isclass(found):
        found = found()
    if not callable(found):
        raise ConfigError(f"{location}: {name!r} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def split_location(location: str) -> tuple[str, str]:
    source, _, name = location.rpartition(":")
    if not source or not name.isidentifier():
        raise ConfigError(f"{location!r} is not of the form 'file.py:name' or 'module:name'")
    return source, name


def find_problem(location: str, base: Path, allowed: Iterable[str] | None = None) -> str | None:
    """What is wrong with a location, as far as can be told without running any of its code.

    `allowed`: names that the function's parameters may have; None allows all.
    """
    try:
        source, name = split_location(location)
    except ConfigError as exc:
        return str(exc)
    if not source.endswith(".py"):
        return None
    path = base / source
    if not path.is_file():
        return f"{location!r}: there is no file {path}"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except (SyntaxError, ValueError) as exc:
        return f"{path} is not valid Python: {exc}"
    names = _top_level_names(tree)
    if name not in names and not _has_star_import(tree):
        return _no_such_name(name, source, names)
    node = names.get(name)
    if allowed is None or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    unknown = [p for p in _required_parameters(node) if p not in tuple(allowed)]
    return _unknown_parameter(unknown[0], tuple(allowed), location) if unknown else None


def add_to_path(folders: Iterable[str]) -> None:
    """Let modules of these folders be imported, after those that can be already."""
    sys.path.extend(folder for folder in folders if folder not in sys.path)


def _load_file(base: Path, source: str) -> ModuleType:
    path = (base / source).resolve()
    if not path.is_file():
        raise ConfigError(f"{source!r}: there is no file {path}")
    digest = hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()
    unique = f"paceline_user_{path.stem}_{digest}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} can not be imported as Python code")
    add_to_path([str(path.parent)])
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique]
        raise
    return module


def _load_module(base: Path, source: str) -> ModuleType:
    add_to_path([str(base.resolve())])
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as exc:
        if exc.name is None or not (source + ".").startswith(exc.name + "."):
            raise
        raise ConfigError(
            f"{source!r}: no such module; a file of your own is named as 'folder/file.py:name', "
            f"relative to {base.resolve()}"
        ) from exc


def _top_level_names(tree: ast.Module) -> dict[str, ast.AST | None]:
    """Names that the module may define; with the node where it is a plain function."""
    names: dict[str, ast.AST | None] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom():
                names |= {(alias.asname or alias.name): None for alias in node.names}
            case ast.Name(ctx=ast.Store()):
                names[node.id] = None
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names[node.name] = None
    plain = (n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return names | {node.name: node for node in plain if not node.decorator_list}


def _has_star_import(tree: ast.Module) -> bool:
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return any(alias.name == "*" for node in imports for alias in node.names)


def _required_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    ordered = [*node.args.posonlyargs, *node.args.args]
    required = ordered[: len(ordered) - len(node.args.defaults)]
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    required += [parameter for parameter, default in pairs if default is None]
    return [parameter.arg for parameter in required]


def _unknown_parameter(name: str, allowed: tuple[str, ...], what: str) -> str:
    near = difflib.get_close_matches(name, allowed, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{what} asks for {name!r}{hint}: it may declare {', '.join(allowed)}"


def _no_such_name(name: str, source: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{source} has no {name!r}{hint}"
