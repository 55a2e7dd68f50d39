"""Code of the user: finding it by file or module, and calling it with what it declares.

Standard library only: the worker processes of rewards import this.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import ConfigError, nearest_hint

NOT_OF_USER_CODE = (KeyboardInterrupt, GeneratorExit)
"""How Python ends what we run. Everything else that leaves user code, `SystemExit` among it, is a
failure of that code: it never ends the run as if it were done."""


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
    """The function that `location` names; a class is made into an object.

    Raises as `load_object`, and ConfigError if it is not something to call.
    """
    found = load_object(location, base)
    if inspect.isclass(found):
        found = found()
    if not callable(found):
        name = location.rpartition(":")[2]
        raise ConfigError(f"{location}: {name!r} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def load_object(location: str, base: Path) -> Any:
    """What `file.py:name` or `module:name` names.

    Files and modules are looked up relative to `base`. A file that did not change is run once.
    Raises ConfigError if there is no such thing; exceptions of the user's own code pass through.
    """
    source, name = split_location(location)
    module = _load_file(base, source) if source.endswith(".py") else _load_module(base, location)
    try:
        return getattr(module, name)
    except AttributeError:
        raise ConfigError(_no_such_name(name, source, vars(module))) from None


def split_location(location: str) -> tuple[str, str]:
    """File or module, and name. Raises ConfigError for another form."""
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
    path = _path_of(base, source)
    if not path.is_file():
        return _no_such_file(path)
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


def failure_text(exc: BaseException) -> str:
    """A failure of user code in one line, with its place: `SystemExit: 0 (env.py:3 in play)`."""
    text = " ".join(f"{type(exc).__name__}: {exc}".split()).rstrip(":")
    frames = traceback.extract_tb(exc.__traceback__)
    own = [f for f in frames if f.filename != __file__ and not f.filename.startswith("<frozen")]
    # The first frame is our own caller's. A syntax error names its place itself.
    if len(own) < 2 or isinstance(exc, SyntaxError):
        return text
    return f"{text} ({own[-1].filename}:{own[-1].lineno} in {own[-1].name})"


def add_to_path(folders: Iterable[str]) -> None:
    """Let modules of these folders be imported, after those that can be already."""
    sys.path.extend(folder for folder in folders if folder not in sys.path)


def _path_of(base: Path, source: str) -> Path:
    return (base / Path(source).expanduser()).resolve()


def _load_file(base: Path, source: str) -> ModuleType:
    path = _path_of(base, source)
    if not path.is_file():
        raise ConfigError(_no_such_file(path))
    # By content, so that an edited file is not taken for what it was.
    digest = hashlib.blake2b(str(path).encode() + path.read_bytes(), digest_size=8).hexdigest()
    unique = f"paceline_user_{path.stem}_{digest}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} can not be imported as Python code")
    add_to_path([str(path.parent)])
    module = importlib.util.module_from_spec(spec)
    # Data classes and pickling look their module up here.
    sys.modules[unique] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique]
        raise
    return module


def _load_module(base: Path, location: str) -> ModuleType:
    source, name = split_location(location)
    add_to_path([str(base.resolve())])
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as exc:
        if exc.name is None or not f"{source}.".startswith(f"{exc.name}."):
            raise
        file = f"{source.replace('.', '/')}.py:{name}"
        raise ConfigError(
            f"no module named {exc.name!r}: for a file of your own write {file!r}, "
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
    near = nearest_hint(name, allowed, few=0)
    return f"{what} asks for {name!r}{near}; it may declare {', '.join(allowed)}"


def _no_such_file(path: Path) -> str:
    siblings = [other.name for other in path.parent.glob("*.py")]
    return f"there is no file {path}{nearest_hint(path.name, siblings)}"


def _no_such_name(name: str, source: str, names: Iterable[str]) -> str:
    public = [known for known in names if not known.startswith("_")]
    return f"{source} has no {name!r}{nearest_hint(name, public)}"
