from __future__ import annotations

import json
import sys

import pytest

from paceline.data.loader import load_source
from paceline.data.sources import DataConfig, HuggingFaceSource
from paceline.errors import DataError, MissingExtraError

ROWS = {"prompt": ["a", "", "c"], "answer": ["1", "2", "3"], "level": [1, 2, 3]}
SKIP = DataConfig(on_bad_row="skip")


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = pytest.importorskip("datasets")
    monkeypatch.setattr(found.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    found.disable_progress_bars()
    return found


def load(tmp_path, path, **keys):
    return load_source(HuggingFaceSource(path=path, **keys), base=tmp_path, rules=SKIP)


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"paceline\[datasets\]"):
        load(tmp_path, "org/name")


def test_a_saved_data_set(tmp_path, datasets):
    datasets.Dataset.from_dict(ROWS).save_to_disk(str(tmp_path / "saved"))
    prompts = load(tmp_path, "saved", slice="0:2")
    assert [(p.text, p.answer, p.metadata) for p in prompts.prompts] == [("a", "1", {"level": 1})]
    assert [str(bad) for bad in prompts.bad_rows] == ["saved/train[1]: prompt is empty"]


def test_splits_of_a_saved_data_set(tmp_path, datasets):
    rows = datasets.Dataset.from_dict(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows.select([2])}).save_to_disk(
        str(tmp_path / "saved")
    )
    assert [p.text for p in load(tmp_path, "saved", split="test").prompts] == ["c"]
    with pytest.raises(DataError, match="no split 'tset'; did you mean 'test'"):
        load(tmp_path, "saved", split="tset")


def test_only_the_columns_in_use_are_read(tmp_path, datasets):
    datasets.Dataset.from_dict(ROWS).save_to_disk(str(tmp_path / "saved"))
    prompts = load(tmp_path, "saved", metadata_keys=())
    assert [p.metadata for p in prompts.prompts] == [{}, {}]


def test_a_folder_of_data_files(tmp_path, datasets):
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": c}) + "\n" for c in "ab"))
    assert [p.text for p in load(tmp_path, "files").prompts] == ["a", "b"]


def test_what_can_not_be_loaded(tmp_path, datasets):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="data set 'nothing', split 'train' can not be loaded"):
        load(tmp_path, "nothing")
