"""Prompts and eval sets are looked at when they are loaded, with the model's own tokenizer."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_model, tiny_tokenizer

from paceline.build.opening import open_store
from paceline.build.parts import Given, Text, load_eval_sets, load_prompts, make_text
from paceline.config import RunFile, load_run_file
from paceline.drivers.dispose import Disposer
from paceline.errors import ConfigError, DataError

RUN_FILE = """
[run]
num_steps = 1
[model]
path = "model"
[data]
path = "prompts.jsonl"
[reward]
kind = "exact"
[[evals.sets]]
name = "held"
data = { path = "held.jsonl" }
"""
GOOD = {"prompt": "1+1=", "answer": "2"}
CHAT = {"messages": [{"role": "user", "content": "1"}], "answer": "1"}


def load(folder: Path, rows: list[Any], held: list[Any], *overrides: str) -> tuple[RunFile, Text]:
    """A project whose model holds 128 tokens and has no chat template."""
    model = tiny_model()
    model.save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    for name, items in (("prompts.jsonl", rows), ("held.jsonl", held)):
        (folder / name).write_text("".join(json.dumps(item) + "\n" for item in items))
    (folder / "run.toml").write_text(RUN_FILE)
    run_file = load_run_file(folder / "run.toml", overrides)
    return run_file, make_text(run_file, model)


def eval_prompts(run_file: RunFile, text: Text, given: Given | None = None) -> list[int]:
    """Number of prompts of each eval set. The reward is none that runs."""

    async def sizes() -> list[int]:
        async with Disposer() as disposer:
            reward: Any = object()
            sets = await load_eval_sets(run_file, given or Given(), text, disposer, reward)
            return [len(one.prompts) for one in sets]

    return asyncio.run(sizes())


def long(length: int) -> dict[str, str]:
    return {"prompt": "1" * length, "answer": "2"}


def test_a_prompt_without_room_is_found_at_load_by_file_and_line(tmp_path: Path) -> None:
    run_file, text = load(tmp_path, [GOOD, long(127), long(128)], [GOOD])
    with pytest.raises(DataError, match=r"prompts\.jsonl:3: has 128 tokens, and the context"):
        load_prompts(run_file, Given(), text)


def test_the_engines_context_counts_too(tmp_path: Path) -> None:
    options = ["engine.max_context=9", "rollout.sampling.max_tokens=4", "data.on_bad_row=skip"]
    run_file, text = load(tmp_path, [GOOD, long(9)], [GOOD], *options)
    (prompts,) = load_prompts(run_file, Given(), text)
    assert len(prompts) == 1
    assert str(prompts.bad_rows[0]).startswith("prompts.jsonl:2: has 9 tokens")


def test_chat_messages_without_a_template_are_bad_rows(tmp_path: Path) -> None:
    run_file, text = load(tmp_path, [GOOD, CHAT], [GOOD])
    with pytest.raises(DataError, match=r"prompts\.jsonl:2: .*the tokenizer has no chat template"):
        load_prompts(run_file, Given(), text)
    with pytest.raises(DataError, match=r"prompts\[1\]: .*the tokenizer has no chat template"):
        load_prompts(run_file, Given(prompts=[GOOD, CHAT]), text)


def test_an_eval_set_has_bad_rows_instead_of_a_filter(tmp_path: Path) -> None:
    rows, limit = [GOOD, long(6)], "data.max_prompt_tokens=5"
    run_file, text = load(tmp_path, rows, rows, limit)
    (prompts,) = load_prompts(run_file, Given(), text)
    assert prompts.num_filtered == 1
    with pytest.raises(DataError, match=r"held\.jsonl:2: has 6 tokens, more than data\.max_prompt"):
        eval_prompts(run_file, text)


@pytest.mark.parametrize("row", [long(128), CHAT])
def test_eval_sets_are_looked_at_like_training_prompts(tmp_path: Path, row: Any) -> None:
    run_file, text = load(tmp_path, [GOOD], [GOOD, row])
    with pytest.raises(DataError, match=r"held\.jsonl:2: "):
        eval_prompts(run_file, text)


def test_skipped_rows_of_eval_sets_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_file, text = load(tmp_path, [GOOD], [GOOD, CHAT], "data.on_bad_row=skip")
    given = Given(eval_prompts=[GOOD, "2+2=", long(200)])
    with caplog.at_level(logging.WARNING):
        assert eval_prompts(run_file, text, given) == [1, 2]
    assert "eval set held: 1 bad rows skipped: held.jsonl:2: " in caplog.text
    assert "eval set eval: 1 bad rows skipped: eval[2]: has 200 tokens" in caplog.text


@pytest.mark.parametrize(("stop", "warns"), [("[]", True), ('["!"]', False)])
def test_answers_without_an_end_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stop: str, warns: bool
) -> None:
    run_file, _ = load(tmp_path, [GOOD], [GOOD], f"rollout.sampling.stop={stop}")
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "model")
    make_text(run_file, model)
    assert ("has an end token" in caplog.text) is warns


def test_a_resume_of_nothing_is_refused_and_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN_FILE)
    for name in ("prompts.jsonl", "held.jsonl"):
        (tmp_path / name).write_text('{"prompt": "1+1=", "answer": "2"}\n')
    tiny_model().save_pretrained(tmp_path / "model")
    run_file = load_run_file(tmp_path / "run.toml", ["run.resume=must", "run.name=typo"])
    with pytest.raises(ConfigError, match=r"there is no .*typo.checkpoints: is run\.name"):
        open_store(run_file, Disposer())
    assert not (tmp_path / "runs").exists()
