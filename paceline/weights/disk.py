"""Weights in a folder that sender and receivers can read, of which a publish writes what changed.

    <folder>/paceline-weights.json     marks the folder as one that is kept by this module
    <folder>/tensors/<hash>.safetensors    some tensors; named by what they hold, never changed
    <folder>/v7/                       version 7: a model folder, whose weights are links
    <folder>/v7-changed/               the same, with only the tensors that differ from version 6

A file holds whole tensors, several if they are small. It is written only if its tensors are not
there yet. `manifest.json` in a version's folder has the hash of each tensor, and which file it is
in. Only the newest version stays, and the one before it until all have the newest.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from paceline.errors import WeightError
from paceline.weights.base import TensorInfo
from paceline.weights.buckets import describe, num_bytes
from paceline.weights.tensors import checksums

if TYPE_CHECKING:
    from torch import Tensor

MARK = "paceline-weights.json"
MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
FILE_BYTES = 16 << 20
"""Tensors are put into one file until it has so many bytes."""

WriteConfig = Callable[[Path], object]
"""Writes the files of a model folder that are not weights: its configuration, its tokenizer."""


class WeightFolder:
    """Keeps the newest weights in a folder. Of one sender at a time."""

    def __init__(
        self, path: Path, write_config: WriteConfig | None = None, file_bytes: int = FILE_BYTES
    ) -> None:
        """Raises WeightError if the folder holds anything that is not of an earlier such object.

        What that left is removed: nobody knows which receivers have it.
        """
        self.path = path
        self._write_config = write_config
        self._file_bytes = file_bytes
        self._version: str | None = None
        """Which all receivers have."""
        self._hashes: dict[str, str] = {}
        """Of that version."""
        self._written: tuple[str, dict[str, str]] | None = None
        """The version that was written last, and its hashes."""
        self._was_there = path.is_dir()
        self._take()

    def write(
        self, version: int, tensors: Iterable[tuple[str, Tensor]]
    ) -> tuple[Path, Path | None]:
        """Write the tensors; returns the model folder, and the one with what changed alone.

        There is no second one unless `acknowledge` was called after the last write. Raises
        WeightError if the disk does not take them.
        """
        try:
            return self._write(version, tensors)
        except (OSError, SafetensorError) as error:
            free = ""
            with contextlib.suppress(OSError):
                free = f" ({shutil.disk_usage(self.path).free >> 20} MiB free)"
            raise WeightError(
                f"weights can not be written to {self.path}: {error}{free}; make room there, mend "
                'its permissions, or choose another engine.weights than "disk"'
            ) from error

    def _write(
        self, version: int, tensors: Iterable[tuple[str, Tensor]]
    ) -> tuple[Path, Path | None]:
        files: dict[str, dict[str, str]] = {}
        hashes_of_all: dict[str, str] = {}
        infos: list[TensorInfo] = []
        for batch in _batches(tensors, self._file_bytes):
            hashes = checksums(batch)
            files[self._put(batch, hashes)] = hashes
            infos += [describe(name, tensor) for name, tensor in batch.items()]
            hashes_of_all |= hashes
        self._written = f"v{version}", hashes_of_all
        base = self._version
        full = self._folder(f"v{version}", files, infos, base=None)
        if base is None or base == full.name:
            return full, None
        changed = {
            file: hashes
            for file, hashes in files.items()
            if any(self._hashes.get(name) != value for name, value in hashes.items())
        }
        return full, self._folder(f"v{version}-changed", changed, infos, base=base)

    def acknowledge(self) -> None:
        """All receivers have what was written last: the former version goes."""
        if self._written is None:
            return
        self._version, self._hashes = self._written
        kept = {self._version, f"{self._version}-changed"}
        used: set[str] = set()
        for folder in self._versions():
            if folder.name in kept:
                used |= {link.resolve().name for link in folder.glob("*.safetensors")}
            else:
                shutil.rmtree(folder)
        for file in (self.path / "tensors").iterdir():
            if file.name not in used:
                file.unlink()

    def forget(self) -> None:
        """It is not known who has what any more: the next write is for all, in full."""
        self._version, self._hashes = None, {}

    def remove(self) -> None:
        """All of it; the folder itself too unless it was there before. Idempotent."""
        if not (self.path / MARK).exists():
            return
        for folder in self._versions():
            shutil.rmtree(folder)
        shutil.rmtree(self.path / "tensors", ignore_errors=True)
        (self.path / MARK).unlink()
        if not self._was_there:
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def _take(self) -> None:
        mark = self.path / MARK
        self.path.mkdir(parents=True, exist_ok=True)
        if not mark.exists() and any(self.path.iterdir()):
            raise WeightError(
                f"{self.path} is not empty and not a folder of published weights (it has no "
                f"{MARK}): give an empty or a new folder"
            )
        mark.write_text(json.dumps({"process": os.getpid()}))
        for folder in self._versions():
            shutil.rmtree(folder)
        shutil.rmtree(self.path / "tensors", ignore_errors=True)
        (self.path / "tensors").mkdir()

    def _versions(self) -> list[Path]:
        return [path for path in self.path.glob("v[0-9]*") if path.is_dir()]

    def _put(self, batch: dict[str, Tensor], hashes: dict[str, str]) -> str:
        digest = blake2b(json.dumps(hashes).encode(), digest_size=16).hexdigest()
        file = self.path / "tensors" / f"{digest}.safetensors"
        if not file.exists():
            part = file.with_suffix(".part")
            save_file({n: t.contiguous() for n, t in batch.items()}, part, {"format": "pt"})
            part.replace(file)
        return file.name

    def _folder(
        self, name: str, files: dict[str, dict[str, str]], infos: list[TensorInfo], base: str | None
    ) -> Path:
        folder = self.path / name
        part = self.path / f"{name}.part"
        for old in (folder, part):
            shutil.rmtree(old, ignore_errors=True)
        part.mkdir()
        if self._write_config is not None:
            self._write_config(part)
        for file in files:
            (part / file).symlink_to(Path("..") / "tensors" / file)
        where = {tensor: file for file, hashes in files.items() for tensor in hashes}
        total = sum(num_bytes(info) for info in infos if info.name in where)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (part / INDEX).write_text(json.dumps(index, indent=1))
        manifest = {"base": base, "files": files}
        (part / MANIFEST).write_text(json.dumps(manifest, indent=1))
        part.replace(folder)
        return folder


def read_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a version's folder, file by file, each with its hash checked.

    Raises WeightError if one is missing or not what the sender wrote.
    """
    for file, hashes in _manifest(folder)["files"].items():
        try:
            tensors = load_file(folder / file)
        except (OSError, SafetensorError) as error:
            raise WeightError(f"{folder / file} can not be read: {error}") from error
        found = checksums(tensors)
        if wrong := [name for name in hashes if found.get(name) != hashes[name]]:
            raise WeightError(
                f"{folder / file} does not hold what the sender wrote: {', '.join(wrong[:5])}"
            )
        yield from tensors.items()


def base_of(folder: Path) -> str | None:
    """Of a folder with what changed: the version that it changes, as its folder is named."""
    base: str | None = _manifest(folder)["base"]
    return base


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WeightError(f"{path} can not be read: {error}") from error
    return manifest


def _batches(tensors: Iterable[tuple[str, Tensor]], file_bytes: int) -> Iterator[dict[str, Tensor]]:
    batch: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if batch and size + tensor.nbytes > file_bytes:
            yield batch
            batch, size = {}, 0
        batch[name] = tensor.detach().to("cpu", copy=False)
        size += tensor.nbytes
    if batch:
        yield batch
