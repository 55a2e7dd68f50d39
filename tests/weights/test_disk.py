"""Weights in a folder: a model that loads, only what changed is written, nothing stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from tiny import tiny_model
from transformers import AutoModelForCausalLM

from paceline.errors import WeightError
from paceline.models import write_model_files
from paceline.weights.disk import INDEX, MANIFEST, MARK, WeightFolder, base_of, read_folder
from paceline.weights.tensors import checksums, named_tensors

Tensors = dict[str, torch.Tensor]


def three() -> Tensors:
    return {name: torch.full((4,), float(i)) for i, name in enumerate("abc")}


def written(folder: WeightFolder, version: int, tensors: Tensors) -> tuple[Path, Path | None]:
    made = folder.write(version, tensors.items())
    folder.acknowledge()
    return made


def names(path: Path | None) -> list[str]:
    assert path is not None
    return sorted(name for name, _ in read_folder(path))


def times(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in (path / "tensors").iterdir()}


def test_a_version_is_a_model_folder_that_transformers_loads(tmp_path: Path) -> None:
    model = tiny_model(seed=3, dtype=torch.bfloat16)
    folder = WeightFolder(
        tmp_path / "w", lambda path: write_model_files(model, None, path), file_bytes=4096
    )
    full, changed = folder.write(1, named_tensors(model).items())
    assert changed is None
    assert len(list(full.glob("*.safetensors"))) > 1
    loaded, report = AutoModelForCausalLM.from_pretrained(
        full, output_loading_info=True, dtype="auto"
    )
    assert not report["missing_keys"]
    assert loaded.dtype == torch.bfloat16
    assert checksums(named_tensors(loaded)) == checksums(named_tensors(model))
    assert checksums(dict(read_folder(full))) == checksums(named_tensors(model))


def test_only_what_changed_is_written_and_named(tmp_path: Path) -> None:
    folder, tensors = WeightFolder(tmp_path / "w", file_bytes=1), three()
    written(folder, 1, tensors)
    before = times(folder.path)
    tensors["b"] = tensors["b"] + 1
    full, changed = written(folder, 2, tensors)
    after = times(folder.path)
    assert names(full) == ["a", "b", "c"]
    assert names(changed) == ["b"]
    assert changed is not None
    assert base_of(changed) == "v1"
    assert base_of(full) is None
    assert json.loads((changed / INDEX).read_text())["weight_map"].keys() == {"b"}
    assert len(after) == len(before) == 3  # the former b has gone
    assert sum(before.get(name) == when for name, when in after.items()) == 2
    assert {path.name for path in folder.path.iterdir()} == {MARK, "tensors", "v2", "v2-changed"}


def test_nothing_changed_is_a_folder_without_tensors(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path / "w")
    written(folder, 1, three())
    full, changed = written(folder, 2, three())
    assert names(full) == ["a", "b", "c"]
    assert names(changed) == []


def test_type_and_shape_are_changes_too(tmp_path: Path) -> None:
    folder, tensors = WeightFolder(tmp_path / "w", file_bytes=1), three()
    written(folder, 1, tensors)
    tensors |= {"a": tensors["a"].view(2, 2), "c": tensors["c"].bfloat16()}
    assert names(written(folder, 2, tensors)[1]) == ["a", "c"]


def test_changes_are_counted_from_what_all_have(tmp_path: Path) -> None:
    """A publish that not all receivers took is no base."""
    folder, tensors = WeightFolder(tmp_path / "w", file_bytes=1), three()
    written(folder, 1, tensors)
    tensors["b"] = tensors["b"] + 1
    folder.write(2, tensors.items())  # nobody acknowledges it
    tensors["c"] = tensors["c"] + 1
    full, changed = folder.write(3, tensors.items())
    assert changed is not None
    assert names(changed) == ["b", "c"]
    assert base_of(changed) == "v1"
    folder.forget()
    assert folder.write(4, tensors.items())[1] is None
    assert names(full) == ["a", "b", "c"]


def test_the_former_version_stays_until_all_have_the_new_one(tmp_path: Path) -> None:
    folder, tensors = WeightFolder(tmp_path / "w"), three()
    former, _ = written(folder, 1, tensors)
    folder.write(2, {name: t + 1 for name, t in tensors.items()}.items())
    assert dict(read_folder(former))["a"].tolist() == tensors["a"].tolist()
    folder.acknowledge()
    assert not former.exists()


def test_the_same_version_can_be_written_again(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path / "w")
    written(folder, 1, three())
    full, changed = written(folder, 1, three())
    assert changed is None
    assert names(full) == ["a", "b", "c"]


@pytest.mark.parametrize("damage", ["bits", "cut", "missing", "manifest"])
def test_a_reader_notices_what_is_not_as_it_was_sent(tmp_path: Path, damage: str) -> None:
    full, _ = WeightFolder(tmp_path / "w").write(1, three().items())
    (file,) = full.glob("*.safetensors")
    data = file.read_bytes()
    match damage:
        case "bits":
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "cut":
            file.write_bytes(data[:-4])
        case "missing":
            file.resolve().unlink()
        case "manifest":
            (full / MANIFEST).write_text("{")
    with pytest.raises(WeightError, match=r"can not be read|does not hold what the sender wrote"):
        list(read_folder(full))


def test_nothing_is_left_and_what_was_there_stays(tmp_path: Path) -> None:
    made = WeightFolder(tmp_path / "new" / "w")
    written(made, 1, three())
    made.remove()
    made.remove()
    assert not (tmp_path / "new" / "w").exists()
    (tmp_path / "empty").mkdir()
    kept = WeightFolder(tmp_path / "empty")
    written(kept, 1, three())
    kept.remove()
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_folder_with_anything_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(WeightError, match=f"no {MARK}"):
        WeightFolder(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "all of it"


def test_what_a_killed_sender_left_is_no_base(tmp_path: Path) -> None:
    written(WeightFolder(tmp_path / "w"), 7, three())
    next_run = WeightFolder(tmp_path / "w")
    assert {path.name for path in next_run.path.iterdir()} == {MARK, "tensors"}
    assert next_run.write(8, three().items())[1] is None


def test_an_error_while_tensors_are_made_leaves_the_former_version(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path / "w", file_bytes=1)
    former, _ = written(folder, 1, three())

    def broken() -> object:
        yield "a", torch.zeros(9)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        folder.write(2, broken())  # type: ignore[arg-type]
    assert names(former) == ["a", "b", "c"]
    tensors = three()
    assert names(written(folder, 3, tensors)[1]) == []
    assert len(times(folder.path)) == 3


def test_a_disk_that_takes_no_more_is_told_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    folder = WeightFolder(tmp_path / "w")
    monkeypatch.setattr("paceline.weights.disk.save_file", full)
    with pytest.raises(WeightError, match=r"can not be written to .*/w: I/O error.*MiB free"):
        folder.write(1, three().items())
