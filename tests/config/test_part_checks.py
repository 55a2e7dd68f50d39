"""What runs where, checked before anything starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_files import VALID, write_project

from paceline.config import load_run_file
from paceline.errors import ConfigError


def problems(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_run_file(write_project(folder, text))
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ('[trainer]\nkind = "fsdp"\nranks = 3\nreplicas = 2', r"trainer .*replicas"),
        (
            '[trainer]\nkind = "fsdp"\n[engine]\nweights = "shared"',
            r"engine.weights.*so the engine needs a copy",
        ),
        (
            '[engine]\nkind = "sglang"\nurls = ["http://a:1"]\nweights = "handles"',
            r"engine.weights.*pickled tensors",
        ),
        (
            '[engine]\nkind = "sglang"\nurls = ["http://a:1"]\nextra_arguments = ["--x"]',
            r"engine.extra_arguments .*: engine.urls names servers that run already",
        ),
        ('[engine]\nkind = "vllm"\nurls = ["a:1"]', r"engine.urls.* found 'a:1', allowed"),
        ('[engine]\nkind = "vllm"\nurls = ["http://"]', r"engine.urls.* found 'http://', allowed"),
        ('[engine]\nkind = "vllm"\nurls = ["http://a:x"]', r"engine.urls.* found 'http://a:x'"),
        ('[engine]\nkind = "vllm"\nurls = ["http://a", "http://a/"]', r"engine.urls .*twice"),
        (
            '[engine]\ndtype = "bfloat16"\n[weight_check]\nwhen = "first"',
            r'weight_check.when .*engine.dtype = "bfloat16" rounds: set weight_check.tolerance',
        ),
        ("[weight_check]\ntolerance = -1.0", r"weight_check.tolerance"),
        ('[weight_check]\nskip = [""]', r"weight_check.skip"),
        (
            '[engine]\nkind = "sglang"\nextra_arguments = ["--port", "3"]',
            r"engine.extra_arguments .*take --port out; it names something which",
        ),
        (
            '[engine]\nkind = "vllm"\nextra_arguments = ["--model=x"]',
            r"engine.extra_arguments .*take --model out; set model.path",
        ),
        (
            '[engine]\nkind = "sglang"\nrouter = "sglang"\nrouter_arguments = ["--host=0.0.0.0"]',
            r"engine.router_arguments .*take --host out; set engine.host",
        ),
        (
            '[engine]\nkind = "sglang"\nrouter_arguments = ["--policy", "random"]',
            r'engine.router_arguments .*engine.router = "paceline" takes none',
        ),
        ('[engine]\nkind = "sglang"\nrouter = "nginx"', r"engine.router.*nginx"),
        ('[engine]\nkind = "vllm"\nrouter = "sglang"', r"router.* belongs to kind 'sglang'"),
        ('[engine]\nrouter = "sglang"', r"router.* belongs to kind 'sglang'"),
        (
            '[engine]\nkind = "sglang"\nurls = ["http://a:1"]\npython = "p"',
            r"engine.python .*: engine.urls names servers that run already",
        ),
        ("[engine]\ngpu_memory_utilization = 0.5", r"engine.memory_share"),
        ('[cluster]\nruntime = "ray"', r'cluster.runtime .*: "ray" has nothing to run'),
        ('[engine]\nkind = "sglang"\nmax_batch = 4', r"max_batch.* belongs to kind 'embedded'"),
    ],
)
def test_what_can_not_stand_together_is_refused(tmp_path: Path, text: str, pattern: str) -> None:
    assert re.search(pattern, problems(tmp_path, VALID + text))


def test_a_router_before_servers_of_others_is_started_here(tmp_path: Path) -> None:
    text = (
        '[engine]\nkind = "sglang"\nurls = ["http://a:1"]\nrouter = "sglang"\npython = "p"\n'
        'env = {A = "1"}\nrouter_arguments = ["--policy", "power_of_two", "--cache-threshold=0.2"]'
    )
    load_run_file(write_project(tmp_path, VALID + text))


def test_determinism_is_not_promised_for_servers(tmp_path: Path) -> None:
    text = VALID.replace("num_steps = 3", "num_steps = 3\ndeterministic = true")
    assert "run.deterministic" in problems(tmp_path, text + '[engine]\nkind = "sglang"')


def test_a_policy_has_an_engine_of_its_own_kind(tmp_path: Path) -> None:
    text = (
        '[rollout]\nenv = "e.py:make"\n[engine]\nkind = "sglang"\nmax_running = 4\n'
        '[policies.a]\n[policies.b]\nlearns = false\n[policies.b.engine]\nkind = "embedded"\n'
    )
    (tmp_path / "e.py").write_text("def make():\n    pass\n")
    run_file = load_run_file(write_project(tmp_path, VALID + text))
    assert [run_file.view(name).engine.kind for name in ("a", "b")] == ["sglang", "embedded"]
    assert run_file.view("a").engine.max_running == 4  # type: ignore[union-attr]


def test_each_policy_has_a_weight_check_of_its_own(tmp_path: Path) -> None:
    text = (
        '[rollout]\nenv = "e.py:make"\n[weight_check]\nwhen = "always"\nskip = ["*norm*"]\n'
        "[policies.a]\n[policies.b]\nweight_check.tolerance = 0.05\n"
    )
    (tmp_path / "e.py").write_text("def make():\n    pass\n")
    run_file = load_run_file(write_project(tmp_path, VALID + text))
    checks = [run_file.view(name).weight_check for name in ("a", "b")]
    assert [(c.when, c.skip, c.tolerance) for c in checks] == [
        ("always", ("*norm*",), 0.0),
        ("always", ("*norm*",), 0.05),
    ]
