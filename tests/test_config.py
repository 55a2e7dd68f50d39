from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from run_files import VALID, write_project

from paceline.algorithms.sft import Sft
from paceline.config import (
    RunFile,
    load_run_file,
    load_settings,
    render_run_file,
    write_run_file,
)
from paceline.config.fields import keys_of
from paceline.config.names import SYNONYMS
from paceline.errors import ConfigError

FULL = """\
[run]
name = "full"
num_epochs = 2
seed = 7
[model]
path = "org/model"
dtype = "bfloat16"
[data]
template = "plain"
[[data.sources]]
path = "prompts.jsonl"
weight = 1
[[data.sources]]
kind = "reasoning_gym"
task = "chain_sum"
weight = 2.5
params = { min_terms = 2 }
[rollout.sampling]
max_tokens = 64
stop = ["\\n"]
[rollout.chat_template_options]
enable_thinking = false
[[reward.parts]]
name = "right"
kind = "numeric"
[[reward.parts]]
name = "short"
function = "rewards.py:score"
weight = -0.1
[algorithm]
clip_high = 0.28
[trainer]
max_grad_norm = inf
[evals]
every = 2
[[evals.sets]]
name = "held"
data = { path = "prompts.jsonl", slice = "0:1" }
samples_per_prompt = 4
pass_at = [1, 4]
sampling = { top_p = 0.9 }
[checkpoint]
best_metric = "eval/held/reward"
"""


def problems_of(folder: Path, text: str, *overrides: str, **options: Any) -> list[str]:
    """The lines of the error, without the first; empty if the file is right."""
    path = write_project(folder, text)
    try:
        load_run_file(path, overrides, **options)
    except ConfigError as error:
        return [line.strip() for line in str(error).splitlines()[1:]]
    return []


def test_a_small_file_gets_all_defaults(tmp_path: Path) -> None:
    run_file = load_run_file(write_project(tmp_path))
    assert run_file.run.num_steps == 3
    assert run_file.algorithm.kind == "grpo"
    assert run_file.trainer.kind == "single"
    assert run_file.run_dir == tmp_path / "runs" / "demo"
    assert run_file.resolve("x/y") == tmp_path / "x" / "y"


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = write_project(tmp_path)
    run_file = load_run_file(path, ["trainer.lr=1e-3", "run.num_steps=9", "algorithm.kind=sft"])
    assert run_file.trainer.lr == 1e-3
    assert run_file.run.num_steps == 9
    assert isinstance(run_file.algorithm, Sft)


def test_the_name_defaults_to_that_of_the_file(tmp_path: Path) -> None:
    text = VALID.replace('name = "demo"\n', "")
    assert load_run_file(write_project(tmp_path, text, "my run.toml")).run.name == "my-run"


@pytest.mark.parametrize("text", [VALID, FULL])
def test_the_resolved_file_loads_to_an_equal_run_file(tmp_path: Path, text: str) -> None:
    run_file = load_run_file(write_project(tmp_path, text))
    run_file.run_dir.mkdir(parents=True)
    written = write_run_file(run_file, run_file.run_dir / "run.toml")
    assert load_run_file(written) == run_file
    assert str(tmp_path) not in written.read_text()


def test_a_moved_project_still_loads_its_resolved_file(tmp_path: Path) -> None:
    project = tmp_path / "a"
    project.mkdir()
    run_file = load_run_file(write_project(project, FULL))
    run_file.run_dir.mkdir(parents=True)
    write_run_file(run_file, run_file.run_dir / "run.toml")
    project.rename(tmp_path / "b")
    moved = load_run_file(tmp_path / "b" / "runs" / "full" / "run.toml")
    assert moved.base == tmp_path / "b"
    assert moved.run_dir == tmp_path / "b" / "runs" / "full"


def test_the_resolved_file_spells_out_every_default(tmp_path: Path) -> None:
    text = render_run_file(load_run_file(write_project(tmp_path)))
    assert "lr = 1e-06" in text
    assert "samples_per_prompt = 8" in text


def test_local_models_are_located_and_ids_are_kept(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    path = write_project(tmp_path, VALID.replace("org/model", "model"))
    assert load_run_file(path).located_model.path == str(tmp_path / "model")
    path = write_project(tmp_path, VALID)
    assert load_run_file(path).located_model.path == "org/model"


def test_every_error_is_reported_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = """\
[run]
num_steps = "10"
num_epochs = 3
[model]
path = "./nowhere"
[trainr]
x = 1
[trainer]
lr = "1e-5"
learning_rate = 3
activation_checkpointing = "false"
threads = "none"
lr_schedule = "cosin"
updates_per_step = 40
max_prefill_tokens = 3
[rollout]
samples_per_prompt = 1
max_refills = 2.0
over_sampling = 0.5
[evals]
every = 1
[[evals.sets]]
name = "x"
data = { path = "missing.jsonl" }
[checkpoint]
best_metric = "eval/y/reward"
"""
    found = problems_of(tmp_path, text, "engine.max_batch=0", "nonsense")
    expected = [
        r'run.num_steps \(line 2\): found the text "10", allowed: whole number >= 0; '
        r"write `num_steps = 10` without quotes",
        r"model.path \(line 5\): .*nowhere is not there",
        r"trainr \(line 6\): unknown block or key; did you mean `trainer`\?",
        r'trainer.lr \(line 9\): found the text "1e-5", allowed: number >=? 0; '
        r"write `lr = 1e-5` without quotes",
        r"trainer.learning_rate \(line 10\): unknown key; did you mean `trainer.lr`\?",
        r"trainer.activation_checkpointing \(line 11\): .*write `activation_checkpointing = false`",
        r"trainer.threads \(line 12\): .*TOML has no none: leave the key out to have none",
        r"trainer.lr_schedule \(line 13\): .*one of `constant`, `linear`, `cosine`; did you mean "
        r"'cosine'\?",
        r"trainer.updates_per_step \(line 14\): found 40, but a step has 16 prompts",
        r"trainer.max_prefill_tokens \(line 15\): .*did you mean `engine.max_prefill_tokens`\?",
        r"rollout.samples_per_prompt \(line 17\): found 1, but grpo compares",
        r"rollout.max_refills \(line 18\): found 2.0, .*write `max_refills = 2`",
        r"rollout.over_sampling \(line 19\): found 0.5, allowed: number >= 1",
        r"evals.sets\[0\].data.path \(line 24\): .*missing.jsonl is not there",
        r"checkpoint.best_metric \(line 26\): .*no eval set is called 'y'",
        r"engine.max_batch \(override engine.max_batch=0\): found 0, allowed: whole number >= 1",
        r"override 'nonsense': write it as key=value",
        r"data: missing; name the prompts",
        r"reward: missing: the algorithm learns from rewards",
    ]
    for line, pattern in zip(found, expected, strict=False):
        assert re.search(pattern, line), (line, pattern)
    assert len(found) == len(expected), found


def test_the_first_line_names_the_file_and_counts(tmp_path: Path) -> None:
    path = write_project(tmp_path, "[run]\nnum_steps = 1\n")
    with pytest.raises(ConfigError) as info:
        load_run_file(path)
    assert str(info.value).splitlines()[0] == f"{path}: 3 errors"


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ("[observe]\ntensorboard = 'true'", r"write `tensorboard = true` without quotes"),
        ("[observe]\ntensorboard = 'no'", r"write `tensorboard = false` without quotes"),
        ("[observe]\ntensorboard = 1", r"found 1, allowed: `true` or `false`"),
        ("[observe]\ntensorboard = 'None'", r"TOML has no None: leave the key out to take the d"),
        ("[trainer]\nthreads = ''", r"leave the key out to have none"),
        ("[trainer]\nupdates_per_step = '1_0'", r"write `updates_per_step = 10` without quotes"),
        ("[trainer]\nupdates_per_step = true", r"found true, allowed: whole number >= 1"),
        ("[trainer]\neps = nan", r"found nan"),
        ("[trainer]\nbetas = [0.9]", r"found the list \[0.9\], allowed: list of 2"),
        ("[rollout.sampling]\nstop = 'x'", r'write `stop = \["x"\]`'),
        ("[rollout.sampling]\nstop = ['x', 3]", r"rollout.sampling.stop\[1\].*found 3"),
        ("[engine]\nkind = 'sglan'", r"'sglan', allowed: .*; did you mean 'sglang'\?"),
        ("[algorithm]\nkind = 'gpro'", r"found kind 'gpro', allowed: .*; did you mean 'grpo'\?"),
        ("[algorithm]\nkind = 'sft'\nclip_low = 1", r"belongs to kind 'grpo'.*kind is 'sft'"),
        ("[algorithm]\nloss_mean = 'constant'", r"algorithm.*constant_tokens"),
        ("[memory]\norder = 3", r"found 3, allowed: one of `none`, `host`, `device`"),
        ("lr = 3", r"unknown key; did you mean `trainer.lr` or `critic.lr`\?"),
        ("trainer = 3", r"unknown key|found 3, allowed: table"),
    ],
)
def test_wrong_values_say_what_to_write(tmp_path: Path, line: str, pattern: str) -> None:
    found = problems_of(tmp_path, VALID + line + "\n")
    assert any(re.search(pattern, problem) for problem in found), found


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ("[trainer]\nlearning-rate = 1", r"did you mean `trainer.lr`|unknown key"),
        ("[trainer]\nLR = 1", r"did you mean `lr`\?"),
        ("[trainer]\ntemperature = 1", r"did you mean `rollout.sampling.temperature"),
        ("[trainer]\nqqq = 1", r"allowed here: kind, lr"),
        ("[rollout]\nmax_new_tokens = 4", r"did you mean `rollout.sampling.max_tokens`\?"),
        ("[rollout.sampling]\ntop_pp = 1", r"did you mean `top_p`\?"),
        ("[[evals.sets]]\nname = 'x'\nlimt = 3\ndata = {path = 'p'}", r"did you mean `limit`\?"),
        ("[[data.source]]\npath = 'p'", r"data.source.*did you mean `sources`\?"),
        ("[eval]\nevery = 1", r"did you mean `evals`\?"),
    ],
)
def test_unknown_keys_get_the_nearest_valid_name(tmp_path: Path, line: str, pattern: str) -> None:
    found = problems_of(tmp_path, VALID + line + "\n")
    assert any(re.search(pattern, problem) for problem in found), found


def test_names_of_other_systems_lead_to_keys_that_exist() -> None:
    paths = {key.plain_path for key in keys_of(RunFile)}
    assert set(SYNONYMS.values()) <= paths


def test_a_misspelt_key_is_not_also_called_missing(tmp_path: Path) -> None:
    found = problems_of(tmp_path, VALID.replace("num_steps", "num_step"))
    assert len(found) == 1
    assert "did you mean `num_steps`?" in found[0]


@pytest.mark.parametrize(
    ("text", "overrides", "pattern"),
    [
        (VALID, ["run.num_epochs=2"], r"run.num_steps is set too: keep one"),
        (VALID, ["run.num_steps="], r"run.num_steps.*: missing; write how many steps"),
        (VALID, ["run.num_steps=0"], r"0 only runs the evals, and there are none"),
        (VALID, ["evals.every=2"], r"evals.every .*: 2 has nothing to measure"),
        (VALID, ["data.path="], r"data.path.*: missing; name the prompts"),
        (VALID, ["data="], r"data .*: missing; name the prompts"),
        (VALID, ["reward.kind="], r"reward.*: missing: the algorithm learns from rewards"),
        (VALID, ["reward.kind=", "reward.function=no.py:f"], r"no.py is not there"),
        (VALID, ["data.path=prompt.jsonl"], r"did you mean 'prompts.jsonl'\?"),
        (VALID, ["model.path=./x"], r"x is not there; give a folder"),
        (VALID, ["model.path=."], r"has no config.json"),
        (VALID, ["model.tokenizer=~/none/of/it"], r"model.tokenizer.*is not there"),
        (VALID, ["model.chat_template=t.jinja"], r"model.chat_template.*is not there"),
        (VALID, ["rollout.env=env.py:play"], r"rollout.env.*env.py is not there"),
        (VALID, ["model.dtype=float16"], r"float16 can not be trained"),
        (VALID, ["engine.max_context=100"], r"answers of 256 tokens after a prompt do not fit"),
        (
            VALID,
            ["engine.max_context=300", "data.max_prompt_tokens=50"],
            r"after prompts of up to 50 tokens do not fit into engine.max_context = 300",
        ),
        (VALID, ["engine.weights=shared", "memory.order=host"], r"leave \"weights\" out"),
        # Case 28.
        (VALID, ["rollout.samples_per_prompt=1"], r"write 2 or more"),
        (VALID, ["trainer.updates_per_step=17"], r"found 17, but a step has 16 prompts"),
        # Case 22.
        (VALID, ["rollout.sampling.top_k=3"], r"the trainer applies the temperature only"),
        (VALID, ["rollout.sampling.top_p=0.9"], r"the trainer applies the temperature only"),
        (VALID, ["rollout.sampling.temperature=0"], r"training needs temperature > 0"),
        (VALID, ["checkpoint.best_metric=eval/x/reward"], r"the run has no eval sets"),
        (FULL, ["checkpoint.best_metric=eval/hold/reward"], r"nearest: 'held'"),
        (FULL, ["checkpoint.best_metric=eval/held/pass_at_2"], r"its pass_at is \[1, 4\]"),
        (FULL, ["evals.every="], r"never measured: set evals.every"),
        (
            FULL,
            ["run.num_epochs=", "run.num_steps=20", "evals.every=7", "checkpoint.every=3"],
            r"checkpoint.every = 3 and evals.every = 7 meet at no step",
        ),
        (FULL, ["checkpoint.every=never"], r"leaves no checkpoint to choose from"),
        (FULL, ["evals.sets.0.pass_at=[8]"], r"pass_at = 8 can not be estimated"),
        (FULL, ["algorithm={kind='sft'}"], r"sources\[1\].kind.*learns completions"),
    ],
)
def test_cross_checks(tmp_path: Path, text: str, overrides: list[str], pattern: str) -> None:
    if "algorithm={kind='sft'}" in overrides:
        overrides = ["algorithm.clip_high=", "algorithm.kind=sft"]
    found = problems_of(tmp_path, text, *overrides)
    assert any(re.search(pattern, problem) for problem in found), found


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        (["data="], {"given": ["prompts"]}),
        (["reward="], {"given": ["reward"]}),
        (["reward=", "rollout.env=my_envs:play"], {}),
        (["reward=", "algorithm.kind=sft"], {}),
        (["run.num_steps=0"], {"given": ["eval_prompts"]}),
        (["rollout.sampling.top_k=1", "algorithm.kind=sft"], {}),
        (["rollout.sampling.temperature=0", "run.num_steps=0"], {"given": ["eval_prompts"]}),
        (["rollout.sampling.temperature=0"], {"purpose": "eval", "given": ["eval_prompts"]}),
        (["evals.every=2"], {"given": ["eval_prompts"]}),
        (["run.num_steps=", "data="], {"purpose": "eval", "given": ["eval_prompts"]}),
        (["run.num_steps=", "data="], {"purpose": "reward"}),
        (["rollout.samples_per_prompt=1", "algorithm.kind=sft"], {}),
        (["run.num_steps=", "run.num_epochs=1"], {}),
        (["checkpoint.best_metric=train/loss"], {}),
    ],
)
def test_what_is_allowed(tmp_path: Path, overrides: list[str], options: dict[str, Any]) -> None:
    assert problems_of(tmp_path, VALID, *overrides, **options) == []


def test_eval_sets_need_a_reward_of_their_own_or_the_common_one(tmp_path: Path) -> None:
    text = VALID + '[[evals.sets]]\nname = "a"\ndata = { path = "prompts.jsonl" }\n'
    without = ["reward=", "algorithm.kind=sft"]
    found = problems_of(tmp_path, text, *without)
    assert len(found) == 1
    assert found[0].startswith("evals.sets[0].reward (line 10): missing")
    assert problems_of(tmp_path, text, *without, "evals.sets.0.reward={kind='exact'}") == []


@pytest.mark.parametrize(
    "settings",
    [
        {"model.path": "org/model", "run.num_steps": 3, "trainer.lr": 1e-4},
        {"model": {"path": "org/model"}, "run": {"num_steps": 3}, "trainer": {"lr": 1e-4}},
        {"model.path": Path("org/model"), "run.num_steps": 3, "trainer.lr": 1e-4, "data": None},
    ],
)
def test_settings_from_python(tmp_path: Path, settings: Mapping[str, Any]) -> None:
    given = ["prompts", "reward"]
    run_file = load_settings(settings, base=tmp_path, name="py", given=given)
    assert run_file.trainer.lr == 1e-4
    assert run_file.run.name == "py"
    assert run_file.model.path == "org/model"
    assert run_file.base == tmp_path


def test_settings_have_the_same_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as info:
        load_settings({"model.path": "m", "trainer.lrr": 1, "trainer.eps": "x"}, base=tmp_path)
    text = str(info.value)
    assert text.startswith("settings: 5 errors")
    assert "trainer.lrr: unknown key; did you mean `lr`?" in text
    assert 'trainer.eps: found the text "x", allowed: number > 0' in text


def test_a_python_object_in_the_settings_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward.function: found the Python object <"):
        load_settings({"model.path": "m", "reward.function": len}, base=tmp_path)


def test_settings_of_the_caller_are_left_alone(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": {"path": "m"}, "run": {"num_steps": 1}}
    load_settings({**settings, "run.seed": 3}, base=tmp_path, given=["prompts", "reward"])
    assert settings == {"model": {"path": "m"}, "run": {"num_steps": 1}}


def test_every_key_has_a_docstring() -> None:
    bare = [f"{key.owner.__name__}.{key.name}" for key in keys_of(RunFile) if not key.doc]
    assert bare == []


def test_loading_imports_nothing_heavy(tmp_path: Path) -> None:
    path = write_project(tmp_path, FULL)
    code = (
        "import sys; from paceline.config import load_run_file; "
        f"load_run_file({str(path)!r}); "
        "heavy = ['torch', 'transformers', 'numpy', 'pyarrow', 'datasets', 'rich', 'asyncio']; "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_an_eval_set_inherits_the_sampling_keys_it_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "run.toml").write_text(
        """
        [run]
        num_steps = 1
        [model]
        path = "org/model"
        [data]
        path = "p.jsonl"
        [reward]
        kind = "exact"
        [rollout.sampling]
        max_tokens = 7
        stop = ["x"]
        [evals]
        every = 1
        [[evals.sets]]
        name = "greedy"
        data = { path = "p.jsonl" }
        sampling = { temperature = 0 }
        """
    )
    run_file = load_run_file(tmp_path / "run.toml")
    sampling = run_file.evals.sets[0].sampling
    assert sampling is not None
    assert (sampling.temperature, sampling.max_tokens, sampling.stop) == (0, 7, ("x",))
    again = load_run_file(write_run_file(run_file, tmp_path / "resolved.toml"))
    assert again.evals == run_file.evals
