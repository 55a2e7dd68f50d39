"""File layers for tests: one that does not wait for the disk, one that dies at an operation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.observe.files import Files


class Crash(BaseException):
    """The process is gone: no operation after it has an effect."""


class FastFiles(Files):
    """Real files, without waiting for the disk."""

    def _flush(self, handle: int) -> None:
        pass


class CrashingFiles(FastFiles):
    """Dies at operation number `at` (from 0), before it or half-way through it.

    Operations are counted and named in `log`; with `at=None` it never dies.
    """

    def __init__(self, at: int | None = None, *, half_done: bool = False) -> None:
        self.at = at
        self.half_done = half_done
        self.log: list[tuple[str, Path]] = []
        self.is_dead = False

    def _do(self, name: str, path: Path, whole: Callable[[], None], half: Callable[[], None]):
        if self.is_dead:
            raise Crash
        self.log.append((name, path))
        if len(self.log) - 1 == self.at:
            self.is_dead = True
            if self.half_done:
                half()
            raise Crash
        whole()

    def make_folder(self, path: Path) -> None:
        make = super().make_folder
        self._do("make_folder", path, lambda: make(path), lambda: make(path))

    def write(self, path: Path, data: bytes) -> None:
        write = super().write
        half = data[: len(data) // 2]
        self._do("write", path, lambda: write(path, data), lambda: write(path, half))

    def append(self, path: Path, data: bytes) -> None:
        append = super().append
        half = data[: len(data) // 2]
        self._do("append", path, lambda: append(path, data), lambda: append(path, half))

    def sync(self, path: Path) -> None:
        sync = super().sync
        self._do("sync", path, lambda: sync(path), lambda: sync(path))

    def rename(self, old: Path, new: Path) -> None:
        rename = super().rename
        self._do("rename", new, lambda: rename(old, new), lambda: rename(old, new))

    def remove(self, path: Path) -> None:
        remove = super().remove
        self._do("remove", path, lambda: remove(path), lambda: remove(path))

    def remove_tree(self, path: Path) -> None:
        remove = super().remove_tree

        def half() -> None:
            files = sorted(p for p in path.rglob("*") if p.is_file())
            for file in files[: (len(files) + 1) // 2]:
                file.unlink()

        self._do("remove_tree", path, lambda: remove(path), half)
