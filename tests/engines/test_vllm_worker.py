"""What runs inside a server, as far as that goes without vLLM."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.engines.vllm_launch import EXTENSION, KEY, KEY_REQUIRED, SERVER_FOLDER
from paceline.weights.disk import WeightFolder


@pytest.fixture(scope="module")
def worker() -> Any:
    spec = importlib.util.spec_from_file_location(
        "paceline_vllm", SERVER_FOLDER / "paceline_vllm.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_names_that_a_server_is_told(worker: Any) -> None:
    for name in (EXTENSION, KEY_REQUIRED):
        module, _, attribute = name.rpartition(".")
        assert module == worker.__name__
        assert hasattr(worker, attribute)
    assert worker.KEY == KEY


def test_it_needs_no_paceline_on_the_path(tmp_path: Path) -> None:
    """And takes nothing of Paceline that an environment of vLLM lacks."""
    code = (
        "import os, sys\n"
        "sys.path = [p for p in sys.path if not os.path.isdir(p + '/paceline')]\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        "import importlib.util as u\n"
        "assert u.find_spec('paceline') is None\n"
        "sys.modules['pydantic'] = sys.modules['transformers'] = None\n"
        "import paceline_vllm as p\n"
        "for part in ('handles', 'collective', 'buckets', 'disk'):\n"
        "    p.paceline('weights.' + part)\n"
        "print(sorted(m for m in sys.modules if m.startswith('paceline.')))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False,
        cwd=tmp_path, env={"PYTHONPATH": str(SERVER_FOLDER), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "paceline.engines" not in result.stdout


@pytest.mark.parametrize(
    ("headers", "passes"),
    [
        ([(b"authorization", b"Bearer secret")], True),
        ([(b"authorization", b"Bearer other")], False),
        ([], False),
    ],
)
def test_the_key(worker: Any, monkeypatch: pytest.MonkeyPatch, headers: Any, passes: bool) -> None:
    async def main() -> None:
        reached: list[Any] = []
        sent: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            reached.append(scope["type"])

        async def send(message: Any) -> None:
            sent.append(message)

        guarded = worker.KeyRequired(app)
        await guarded({"type": "lifespan"}, None, send)
        assert reached == ["lifespan"]
        await guarded({"type": "http", "headers": headers}, None, send)
        await guarded({"type": "websocket", "headers": headers}, None, send)
        assert reached[1:] == (["http", "websocket"] if passes else [])
        assert [m.get("status") for m in sent][:1] == ([] if passes else [401])

    monkeypatch.setenv(KEY, "secret")
    asyncio.run(main())


def intake(worker: Any) -> Any:
    """Of a model with one fused layer, without vLLM."""
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    model = SimpleNamespace(packed_modules_mapping=fused)
    return worker.Intake(SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model)))


def test_tensors_of_one_layer_come_together(worker: Any, tmp_path: Path) -> None:
    names = ["l.0.q_proj.weight", "l.0.k_proj.weight", "l.0.k_proj.bias", "l.0.v_proj.weight",
             "l.0.o_proj.weight", "l.1.q_proj.weight", "l.1.mlp.experts.0.up.weight",
             "l.1.mlp.experts.1.down.weight", "norm.weight"]  # fmt: skip
    tensors = {name: torch.full((2,), float(i)) for i, name in enumerate(names)}
    folder = WeightFolder(tmp_path / "w", file_bytes=8)
    folder.write(1, tensors.items())
    folder.acknowledge()
    tensors["l.0.k_proj.bias"] += 1
    tensors["l.1.mlp.experts.1.down.weight"] += 1
    full, changed = folder.write(2, tensors.items())
    assert changed is not None
    found = dict(intake(worker)._changed(full, changed))
    assert sorted(found) == sorted([*names[:4], *names[6:8]])
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in found.items())


def test_the_layer_of_a_tensor(worker: Any) -> None:
    layer_of = intake(worker)._layer_of
    assert layer_of("m.0.attn.q_proj.weight") == layer_of("m.0.attn.v_proj.bias")
    assert layer_of("m.0.attn.q_proj.weight") != layer_of("m.1.attn.q_proj.weight")
    assert layer_of("m.0.mlp.experts.3.up.weight") == layer_of("m.0.mlp.experts.4.down.weight")
    assert layer_of("m.0.norm.weight") != layer_of("m.0.norm2.weight")


def test_a_problem_is_told_and_not_raised(worker: Any) -> None:
    class Broken(worker.PacelineWeights):  # type: ignore[name-defined, misc]
        device = "cpu"

    found = Broken().paceline_take_folder("/nowhere", None)
    assert "can not be read" in found["error"] or "no update" in found["error"]


def test_the_index_of_a_folder(worker: Any, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    index = {"weight_map": {"a": "x.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert worker._files_of(tmp_path) == {"a": "x.safetensors"}
