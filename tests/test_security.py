"""Nothing that comes from outside is run, and no port is opened.

Code runs from three places only: this package, functions that the run file names, and models that
it trusts by `trust_remote_code`. Data, checkpoints, weights and what processes say to each other
are read by formats that can not hold code.
"""

from __future__ import annotations

import ast
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from paceline.errors import ConfigError
from paceline.models import ModelConfig, load_model

PACKAGE = Path(__file__).parent.parent / "paceline"
FILES = sorted(PACKAGE.rglob("*.py"))

RUNS_CODE = {
    "cloudpickle.load",
    "cloudpickle.loads",
    "compile",
    "dill.load",
    "dill.loads",
    "eval",
    "exec",
    "joblib.load",
    "marshal.load",
    "marshal.loads",
    "os.popen",
    "os.system",
    "pandas.read_pickle",
    "pickle.Unpickler",
    "pickle.load",
    "pickle.loads",
    "shelve.open",
    "yaml.full_load",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
}
RUNS_CODE_IF = {"allow_pickle": True, "shell": True, "trust_remote_code": True}
"""Keyword values that let data or words run."""
MUST_SAY = {"torch.load": ("weights_only", True)}
ALLOWED = {
    # A child process reads from the pipe that its parent, this package, made for it.
    ("rollout/worker_main.py", "pickle.loads"),
    ("rollout/worker_main.py", "cloudpickle.loads"),
    # The two ends of a socket pair, or of Ray's own channel, are this package's alone.
    ("cluster/wire.py", "pickle.loads"),
}
MAY_OPEN = {
    # Looks whether a port is free, and lets go of it.
    ("network.py", "probe.bind"),
    # A client; the package has a server, too.
    ("engines/http.py", "aiohttp"),
    # Ranks of one trainer, and a trainer with its engines: at the address that they were given.
    ("trainers/fsdp_ranks.py", "torch.distributed.init_process_group"),
    ("weights/collective.py", "c10d.TCPStore"),
    ("weights/collective.py", "self._socket.bind"),
}
OPENS_PORT = {
    "bind",
    "create_server",
    "start_server",
    "start_unix_server",
    "init_process_group",
    "TCPStore",
}
SERVERS = {"aiohttp", "fastapi", "flask", "http.server", "socketserver", "starlette", "uvicorn"}


def full_names(tree: ast.AST) -> dict[str, str]:
    """Local name -> what it was imported as."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Every call with the full name of what is called."""
    names = full_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            first, dot, rest = ast.unparse(node.func).partition(".")
            yield node, names.get(first, first) + dot + rest


def dangers(source: str) -> list[str]:
    """What could run code that stands in data."""
    found = []
    for node, name in calls(ast.parse(source)):
        given = {k.arg: k.value for k in node.keywords}
        values = {k: v.value for k, v in given.items() if isinstance(v, ast.Constant)}
        if name in RUNS_CODE:
            found.append(name)
        if name in MUST_SAY and values.get(MUST_SAY[name][0]) is not MUST_SAY[name][1]:
            found.append(name)
        found += [f"{name}: {key}" for key, bad in RUNS_CODE_IF.items() if values.get(key) is bad]
    return found


def servers(source: str) -> list[str]:
    """What opens a port."""
    tree = ast.parse(source)
    imported = set(full_names(tree).values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module)
    packages = {name for name in imported if name in SERVERS or name.split(".")[0] in SERVERS}
    opened = [name for _, name in calls(tree) if name.rpartition(".")[2] in OPENS_PORT]
    # `Signature.bind` of a function's parameters opens nothing.
    return sorted(packages) + [name for name in opened if not name.startswith("signature.")]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_from_outside_is_run(path: Path) -> None:
    file = path.relative_to(PACKAGE).as_posix()
    assert [name for name in dangers(path.read_text()) if (file, name) not in ALLOWED] == []


def test_what_is_allowed_is_in_use() -> None:
    for file, name in ALLOWED:
        assert name in dangers((PACKAGE / file).read_text())
    for file, name in MAY_OPEN:
        assert name in servers((PACKAGE / file).read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_port_is_opened(path: Path) -> None:
    file = path.relative_to(PACKAGE).as_posix()
    assert [name for name in servers(path.read_text()) if (file, name) not in MAY_OPEN] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle; pickle.load(file)",
        "from pickle import loads as read; read(data)",
        "import pickle as p; p.Unpickler(file)",
        "import torch; torch.load(path)",
        "import torch; torch.load(path, weights_only=False)",
        "import numpy as np; np.load(path, allow_pickle=True)",
        "import yaml; yaml.load(text, Loader=yaml.Loader)",
        "import subprocess; subprocess.run(words, shell=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "eval(text)",
        "exec(text)",
    ],
)
def test_what_runs_code_is_found(source: str) -> None:
    assert len(dangers(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "import re; re.compile(text)",
        "import torch; torch.load(path, weights_only=True)",
        "import yaml; yaml.safe_load(text)",
        "import json; json.loads(text)",
        "import cloudpickle; cloudpickle.dumps(f)",
        "AutoModel.from_pretrained(path, trust_remote_code=trust)",
    ],
)
def test_what_is_harmless_is_left_alone(source: str) -> None:
    assert dangers(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio; asyncio.start_server(f, port=1)",
        "import socket; socket.create_server(('', 1))",
        "sock.bind(('127.0.0.1', 1))",
        "import uvicorn",
        "from http.server import HTTPServer",
        "import http.server",
    ],
)
def test_what_opens_a_port_is_found(source: str) -> None:
    assert servers(source)


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_the_payload_would_run(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
    assert (tmp_path / "ran").is_dir()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_weight_files_can_not_run_code(tmp_path: Path, name: str) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    if name.endswith(".bin"):
        torch.save({"weight": Payload(tmp_path / "ran")}, tmp_path / "model" / name)
    else:
        (tmp_path / "model" / name).write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(ConfigError):
        load_model(ModelConfig(path=str(tmp_path / "model")), seed=0)
    assert not (tmp_path / "ran").exists()


def test_a_models_own_code_does_not_run_unless_it_is_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    config = folder / "config.json"
    own = '{"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}, '
    text = config.read_text().replace('"llama"', '"own"').replace("{", own, 1)
    config.write_text(text)
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_model(ModelConfig(path=str(folder)), seed=0)
    assert not (tmp_path / "ran").exists()
