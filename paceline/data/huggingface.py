"""Rows of a data set of the Hugging Face `datasets` library, from a folder or from the Hub."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.data.rows import RawRow
from paceline.data.sources import HuggingFaceSource
from paceline.errors import DataError, MissingExtraError, nearest_hint

if TYPE_CHECKING:
    import datasets


def read_dataset(source: HuggingFaceSource, base: Path) -> Iterable[RawRow]:
    """The rows of one split, counted from 0. Only the columns in use are decoded.

    Raises:
        MissingExtraError: without the package `datasets`.
        DataError: if the data set or its split can not be loaded.
    """
    if find_spec("datasets") is None:
        raise MissingExtraError('a source of kind "huggingface"', "datasets", "datasets")
    split = _load(source, base)
    if source.metadata_keys is not None:
        wanted = {
            *(source.metadata_keys),
            *("prompt", "messages", "answer", "completion"),
            *(source.prompt_key, source.answer_key, source.completion_key, source.id_key),
        }
        split = split.select_columns([name for name in split.column_names if name in wanted])
    shown = f"{source.label}/{source.split}"
    return (RawRow(f"{shown}[{index}]", row) for index, row in enumerate(split))


def _load(source: HuggingFaceSource, base: Path) -> datasets.Dataset:
    import datasets

    folder = base / Path(source.path).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            loaded = datasets.load_from_disk(str(folder))
        else:
            loaded = datasets.load_dataset(
                str(folder) if folder.is_dir() else source.path,
                source.config,
                split=source.split,
                revision=source.revision,
            )
    # What goes wrong in there has many types: network, parsing, missing files.
    except Exception as error:
        raise DataError(
            f"data set {source.path!r}, split {source.split!r} can not be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if source.split not in loaded:
            raise DataError(
                f"data set {source.path!r} has no split {source.split!r}"
                f"{nearest_hint(source.split, loaded)}"
            )
        return loaded[source.split]
    return loaded
