"""What a trainer saves: complete, without pickle, on the disk, and bit-equal when loaded."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import math
import os
from pathlib import Path

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer
from trainer_rows import (
    PlainPolicyGradient,
    assert_equal,
    make_trainer,
    model64,
    moments_of,
    random_rows,
    train,
    weights,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.errors import CheckpointError, ResumeMismatchError
from paceline.trainers.base import SingleTrainerConfig
from paceline.trainers.single import SingleTrainer

SCHEDULE = {"lr_schedule": "cosine", "lr_warmup_steps": 2}


def _save(trainer: SingleTrainer, path: Path) -> Path:
    asyncio.run(trainer.save(path))
    return path


def _load(trainer: SingleTrainer, path: Path) -> None:
    asyncio.run(trainer.load(path))


def test_a_save_changes_nothing(tmp_path):
    batches = [random_rows(seed=seed) for seed in range(4)]
    straight, saving = make_trainer(), make_trainer()
    expected = train(straight, batches)
    found = train(saving, batches[:2])
    _save(saving, tmp_path)
    assert found + train(saving, batches[2:]) == expected
    assert_equal(weights(saving._core.model), weights(straight._core.model))


def test_loading_into_a_trainer_that_has_moved_on_restores_it(tmp_path):
    trainer = make_trainer()
    train(trainer, [random_rows()])
    _save(trainer, tmp_path)
    before, moments_before = weights(trainer._core.model), moments_of(trainer)
    train(trainer, [random_rows(seed=1)] * 2)
    _load(trainer, tmp_path)
    assert trainer.version == 1
    assert_equal(weights(trainer._core.model), before)
    assert_equal(moments_of(trainer), moments_before)


def test_a_save_before_the_first_step_has_no_moments(tmp_path):
    _save(make_trainer(model64(seed=2)), tmp_path)
    trainer = make_trainer()
    train(trainer, [random_rows()])
    _load(trainer, tmp_path)
    assert trainer.version == 0
    assert moments_of(trainer) == {}
    assert_equal(weights(trainer._core.model), weights(model64(seed=2)))


def test_a_skipped_step_is_kept_apart_from_the_schedule(tmp_path):
    bad = random_rows(seed=1)
    bad[0].advantages_T[bad[0].mask_T] = float("nan")
    trainer = make_trainer(**SCHEDULE)
    train(trainer, [random_rows(), bad])
    _save(trainer, tmp_path)
    resumed = make_trainer(**SCHEDULE)
    _load(resumed, tmp_path)
    assert train(resumed, [random_rows()]) == train(trainer, [random_rows()])
    assert resumed.version == 3


def test_weights_are_written_into_the_storage_that_others_share(tmp_path):
    trainer = make_trainer()
    train(trainer, [random_rows()])
    _save(trainer, tmp_path)
    pointers = {n: p.data_ptr() for n, p in trainer._core.model.named_parameters()}
    _load(trainer, tmp_path)
    assert {n: p.data_ptr() for n, p in trainer._core.model.named_parameters()} == pointers


def test_the_folder_is_a_hugging_face_model_and_has_no_pickle(tmp_path):
    model = tiny_model()
    config = SingleTrainerConfig(device="cpu", lr=1e-2)
    trainer = SingleTrainer(config, model, tiny_tokenizer(), PlainPolicyGradient(), horizon=3)
    train(trainer, [random_rows()])
    _save(trainer, tmp_path)
    files = {str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*") if f.is_file()}
    assert {"trainer.json", "optimizer.safetensors", "model/model.safetensors"} <= files
    assert {Path(f).suffix for f in files} <= {".json", ".safetensors", ".jinja"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert_equal(weights(loaded), weights(model))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(tmp_path / "model").decode([3, 4]) == "01"
    state = json.loads((tmp_path / "trainer.json").read_text())
    assert state["counters"] == {"version": 1, "updates": 1}
    assert state["settings"]["lr"] == 1e-2
    assert state["environment"]["threads"] == torch.get_num_threads()


def test_every_file_and_folder_is_on_the_disk_when_save_returns(tmp_path, monkeypatch):
    synced: set[tuple[int, int]] = set()
    written: list[int] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        status = os.fstat(handle)
        synced.add((status.st_ino, status.st_size))
        written.append(status.st_ino)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    _save(make_trainer(), tmp_path / "new")
    for entry in [tmp_path / "new", *(tmp_path / "new").rglob("*")]:
        assert (entry.stat().st_ino, entry.stat().st_size) in synced, entry
    assert written[-1] == (tmp_path / "new").stat().st_ino


def test_another_model_is_refused_with_what_differs_and_nothing_changes(tmp_path):
    saved = make_trainer(tiny_model())
    train(saved, [random_rows()])
    _save(saved, tmp_path)
    for model, match in (
        (tiny_model(hidden=16), r"model\.embed_tokens\.weight has shape \[64, 32\].*\[64, 16\]"),
        (tiny_model(layers=3), r"parameter model\.layers\.2\.\S+ is only in the run"),
        (tiny_model(layers=1), r"parameter model\.layers\.1\.\S+ is only in the checkpoint"),
        (tiny_model(dtype=torch.float64), r"dtype is 'float32'.*'float64'"),
    ):
        trainer = make_trainer(copy.deepcopy(model))
        with pytest.raises(ResumeMismatchError, match=match):
            _load(trainer, tmp_path)
        assert_equal(weights(trainer._core.model), weights(model))
        assert trainer.version == 0


@pytest.mark.parametrize(
    "name", ["trainer.json", "optimizer.safetensors", "model/model.safetensors"]
)
@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_damaged_folder_is_refused_and_nothing_changes(tmp_path, name, damage):
    saved = make_trainer()
    train(saved, [random_rows()])
    file = _save(saved, tmp_path) / name
    if damage == "cut":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        file.unlink()
    trainer = make_trainer(model64(seed=4))
    with pytest.raises(CheckpointError, match=r"can not be read.*older checkpoint"):
        _load(trainer, tmp_path)
    assert_equal(weights(trainer._core.model), weights(model64(seed=4)))
    assert trainer.version == 0


def test_a_folder_of_another_format_is_refused(tmp_path):
    file = _save(make_trainer(), tmp_path) / "trainer.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(CheckpointError, match="format 99"):
        _load(make_trainer(), tmp_path)


def test_changed_settings_and_surroundings_are_named_and_accepted(tmp_path, caplog):
    file = _save(make_trainer(lr=1e-3), tmp_path) / "trainer.json"
    with caplog.at_level(logging.INFO, "paceline.trainers.state"):
        _load(make_trainer(lr=1e-3), tmp_path)
        assert not caplog.records
        _load(make_trainer(lr=2e-3), tmp_path)
        state = json.loads(file.read_text())
        state["environment"]["threads"] += 1
        file.write_text(json.dumps(state))
        _load(make_trainer(lr=1e-3), tmp_path)
    settings, surroundings = caplog.records
    assert settings.levelno == logging.INFO
    assert "another lr: 0.002, was 0.001" in settings.getMessage()
    assert surroundings.levelno == logging.WARNING
    assert "another threads" in surroundings.getMessage()
    assert "bit-identical" in surroundings.getMessage()


def test_an_infinite_setting_that_stayed_is_no_change(tmp_path, caplog):
    _save(make_trainer(max_grad_norm=math.inf), tmp_path)
    with caplog.at_level(logging.INFO, "paceline.trainers.state"):
        _load(make_trainer(max_grad_norm=math.inf), tmp_path)
    assert not caplog.records
