from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.algorithms import ALGORITHMS
from paceline.config import RunFile
from paceline.config.fields import keys_of
from paceline.errors import ConfigError
from paceline.explain import INTERACTIONS, explain, interactions, reference, unit_of

DOCS = Path(__file__).parent.parent / "docs"


def test_a_key_shows_meaning_type_default_unit_and_interactions() -> None:
    text = explain("trainer.lr")
    assert "Peak learning rate of AdamW" in text
    assert "allowed  number >" in text
    assert "default  1e-06" in text
    assert "unit     change of a weight" in text
    assert "see also" in text
    assert "trainer.lr_schedule" in text


def test_a_block_is_a_table_of_its_keys() -> None:
    text = explain("trainer")
    assert text.startswith("[trainer]")
    for name in type(RunFile.model_fields["trainer"].default).model_fields:
        assert f"\n{name} " in text


@pytest.mark.parametrize("name", ["trainer", "[trainer]", " trainer "])
def test_brackets_and_blanks_do_not_matter(name: str) -> None:
    assert explain(name) == explain("trainer")


def test_the_file_lists_its_blocks() -> None:
    text = explain()
    for name in RunFile.model_fields:
        assert f"[{name}]" in text or f"[{name}.<name>]" in text


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_a_kind_of_a_block(kind: str) -> None:
    text = explain(f"algorithm.{kind}")
    assert f'kind = "{kind}"' in text
    for name in ALGORITHMS[kind].model_fields:
        assert f"\n{name} " in text
    assert explain(f"algorithm.{kind}.loss_mean").startswith("algorithm.loss_mean")


def test_a_key_of_several_kinds_shows_each_meaning() -> None:
    text = explain("algorithm.loss_mean")
    assert "grpo" in text
    assert "sft" in text
    assert "kind     grpo" not in explain("algorithm.sft.loss_mean")


def test_lists_are_named_with_or_without_brackets() -> None:
    assert explain("evals.sets").startswith("[[evals.sets]]")
    assert explain("evals.sets.limit") == explain("evals.sets[].limit")


def test_a_bare_name_finds_its_key() -> None:
    assert explain("betas") == explain("trainer.betas")
    assert explain("lr") == "lr is a key of several blocks: trainer.lr and critic.lr."
    assert "rollout.sampling.top_p" in explain("top_p")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("trainer.lrr", "trainer.lr"),
        ("trainr.lr", "trainer.lr"),
        ("learning_rate", "trainer.lr"),
        ("trainer.learning_rate", "trainer.lr"),
        ("traner", "trainer"),
        ("algorithm.grop", "algorithm.grpo"),
        ("train/los", "train/loss"),
    ],
)
def test_unknown_names_get_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as info:
        explain(name)
    assert nearest in str(info.value)


def test_a_name_that_is_like_nothing_gets_the_blocks() -> None:
    with pytest.raises(ConfigError, match="blocks: run, model"):
        explain("zzzzzz")


def test_metrics_are_explained_too() -> None:
    assert "global denominator" in explain("train/loss")


def test_every_key_can_be_explained() -> None:
    for key in keys_of(RunFile):
        assert key.plain_path in explain(key.plain_path).replace("[", "").replace("]", "")


def test_interactions_go_both_ways_and_exist() -> None:
    paths = {key.plain_path for key in keys_of(RunFile)}
    for path, others in INTERACTIONS.items():
        assert {path, *others} <= paths
    keys = {key.plain_path: key for key in keys_of(RunFile)}
    assert "engine.max_context" in interactions(keys["data.max_prompt_tokens"])
    assert "trainer.updates_per_step" in interactions(keys["algorithm.clip_low"])
    assert "algorithm.clip_low" in interactions(keys["trainer.updates_per_step"])


def test_units() -> None:
    keys = {key.plain_path: key for key in keys_of(RunFile)}
    assert unit_of(keys["reward.timeout_s"]) == "seconds"
    assert unit_of(keys["rollout.sampling.max_tokens"]) == "tokens"
    assert unit_of(keys["run.num_steps"]) == "steps"
    assert unit_of(keys["run.seed"]) == "plain number"
    assert unit_of(keys["run.name"]) is None


def test_the_reference_is_up_to_date() -> None:
    written = (DOCS / "run-file.md").read_text(encoding="utf-8")
    assert written == reference(), "run `python -m paceline.explain > docs/run-file.md`"


def test_the_reference_has_every_key_once() -> None:
    text = reference()
    for key in keys_of(RunFile):
        shown = f"`[{key.plain_path}]`" in text or f"`[[{key.plain_path}]]`" in text
        assert shown if key.is_block else f"| `{key.name}` |" in text
    assert text.count("| `top_p` |") == 1


def test_the_module_prints_the_reference() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline.explain"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == reference()
