"""The folder of a run's checkpoints: save, find, keep, clean.

    .tmp-step-000012-<unique>    being made; a leftover if its process is gone
    step-000012                  committed
    .old-step-000012-<unique>    committed before, for the moment in which its step is replaced
    .trash-step-000012-<unique>  being deleted

A trainer writes into the staged folder and knows nothing of the commit, so a save that copies to
the host first and writes later needs no other protocol. Only one save is made at a time, and while
one is committed in a thread nothing else of the store is called.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.checkpoint.content import Checkpoint, Found, Skipped, Staged, step_name
from paceline.checkpoint.lock import FolderLock
from paceline.checkpoint.manifest import find_damage, read_manifest, write_manifest
from paceline.checkpoint.retention import Best, rank, steps_to_keep
from paceline.checkpoint_settings import CheckpointConfig
from paceline.errors import CheckpointError, PacelineError
from paceline.observe.files import REAL_FILES, Files, encode_json, unique_name, write_atomically

logger = logging.getLogger(__name__)

STEP = re.compile(r"step-(\d{6,})")
ASIDE = re.compile(r"\.old-step-(\d{6,})-[0-9a-f]{8}")
LEFTOVER = re.compile(r"\.(?:tmp|trash)-(?:step-\d{6,}|latest|best\.json)-[0-9a-f]{8}")
DISK_TROUBLE = tuple(os.strerror(n) for n in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS))
"""How the system says that it does not write a file."""
LATEST = "latest"
BEST = "best.json"


class CheckpointStore:
    """The checkpoints of one run in the folder `root`. Only `prepare` takes it for writing."""

    def __init__(self, root: Path, config: CheckpointConfig, files: Files = REAL_FILES) -> None:
        self.root = root
        self.config = config
        self._files = files
        self._lock = FolderLock(root / ".lock")
        self._awaited: set[int] = set()
        self._current: int | None = None  # the step that this process last found or committed

    def prepare(self) -> list[str]:
        """Lock the folder for this process and clear what crashed saves left; says what.

        Raises CheckpointError if another process writes to the run.
        """
        with self._disk_errors("prepare the folder of checkpoints"):
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()  # ends: at once; a lock that is taken is refused
            return [self._clear(path) for path in sorted(self.root.iterdir()) if _is_ours(path)]

    def close(self) -> None:
        """Let another process write to the run."""
        self._lock.release()

    @contextmanager
    def staging(self, step: int) -> Iterator[Staged]:
        """A folder for the checkpoint of `step`; gone after the block unless it was committed.

        Errors of the disk leave the block as CheckpointError; older checkpoints are untouched.
        """
        folder = self.root / unique_name(f".tmp-{step_name(step)}")
        with self._disk_errors(f"save step {step}"):
            try:
                self._files.make_folder(folder)
                yield Staged(step, folder, self._files)
            finally:
                if folder.exists():
                    with suppress(OSError):
                        self._files.remove_tree(folder)

    def commit(self, staged: Staged) -> Checkpoint:
        """Make a staged checkpoint durable, then update `latest` and delete what need not stay.

        Blocks while it hashes and syncs: call it inside the `staging` block, and in no thread that
        outlives the block.
        """
        manifest = write_manifest(staged.folder, staged.step, self._files)
        target = self.root / step_name(staged.step)
        aside = self._set_aside(target) if target.exists() else None
        try:
            self._files.rename(staged.folder, target)
        except BaseException:
            if aside is not None:
                self._files.rename(aside, target)
            raise
        self._files.sync(self.root)
        self._current = staged.step
        self._tidy(staged.step, aside)
        return Checkpoint(staged.step, target, manifest)

    def _set_aside(self, target: Path) -> Path:
        aside = self.root / unique_name(f".old-{target.name}")
        self._files.rename(target, aside)
        return aside

    def _tidy(self, step: int, aside: Path | None) -> None:
        """What follows a commit. The checkpoint is durable, so nothing here may fail the save."""
        try:
            write_atomically(self.root / LATEST, f"{step_name(step)}\n".encode(), self._files)
            if aside is not None:
                self._delete(aside, step)
            self._apply_retention()
        except OSError as error:
            logger.warning("step %d is saved, but tidying %s failed: %s", step, self.root, error)

    def newest(self) -> Found:
        """The newest complete checkpoint, and all newer folders that are not, with the reason.

        Changes nothing on disk. Reads every byte of the checkpoint that it returns when
        `checkpoint.verify` is `hash`, of older ones only if the newer are damaged.
        """
        found = self._first([(folder, step) for step, folder in reversed(self._candidates())])
        self._current = None if found.checkpoint is None else found.checkpoint.step
        return found

    def at(self, step: int) -> Checkpoint:
        """The checkpoint of one step; CheckpointError says what is wrong or which ones exist."""
        found = self._first([(f, s) for s, f in reversed(self._candidates()) if s == step])
        if found.checkpoint is None:
            reasons = "".join(f"; {s.folder.name}: {s.reason}" for s in found.skipped)
            have = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"{self.root} has no complete checkpoint of step {step}{reasons}; "
                f"steps that exist: {have}"
            )
        return found.checkpoint

    def best(self) -> Best | None:
        """The best checkpoint that is still there, by `checkpoint.best_metric`."""
        ranked = rank(self._scores(), self.config)
        return next((entry for entry in ranked if entry.step in self.steps()), None)

    def steps(self) -> list[int]:
        """Steps with a checkpoint whose files have the right sizes, in order."""
        return sorted({step for step, folder in self._candidates() if _is_complete(folder)})

    def await_score(self, step: int) -> None:
        """Keep this checkpoint until `record` or `forgo` is called: its eval still runs."""
        self._awaited.add(step)

    def forgo(self, step: int) -> None:
        """No score will come for this checkpoint: it stays only if a rule keeps it."""
        if step in self._awaited:
            self._awaited.discard(step)
            with self._disk_errors("delete checkpoints"):
                self._apply_retention()

    def record(self, step: int, values: Mapping[str, float]) -> Best | None:
        """Take the numbers measured at `step`; returns the best if this made a new one.

        Without a checkpoint of that step, or without `best_metric` among the numbers, nothing
        happens. The scores are in `best.json`, so a resumed run goes on with them.
        """
        with self._disk_errors(f"record the score of step {step}"):
            # What a save that was cut short left to delete must not compete.
            self._apply_retention()
        name = self.config.best_metric
        if name is None or name not in values or step not in self.steps():
            self.forgo(step)
            return None
        self._awaited.discard(step)
        before = self.best()
        there = {s for s in self.steps() if self._current is None or s <= self._current}
        scores = {s: value for s, value in self._scores().items() if s in there}
        scores[step] = values[name]
        with self._disk_errors(f"record the score of step {step}"):
            self._write_scores(scores)
            self._apply_retention()
        after = self.best()
        return after if after is not None and after != before else None

    def _first(self, candidates: list[tuple[Path, int]]) -> Found:
        skipped: list[Skipped] = []
        for folder, step in candidates:
            try:
                manifest = read_manifest(folder)
                problems = find_damage(folder, manifest, with_hashes=self.config.verify == "hash")
                if manifest.step != step:
                    problems = [f"its manifest is of step {manifest.step}"]
            except CheckpointError as error:
                problems = [str(error)]
            if not problems:
                return Found(Checkpoint(step, folder, manifest), skipped)
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            skipped.append(Skipped(folder, "; ".join(problems[:3]) + more))
        return Found(None, skipped)

    def _candidates(self) -> list[tuple[int, Path]]:
        """Committed folders by step; of one step, one that was being replaced comes first."""
        found = []
        for path in self.root.iterdir() if self.root.is_dir() else ():
            match = STEP.fullmatch(path.name) or ASIDE.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match[1]), path.name.startswith("step"), path))
        return [(step, path) for step, _, path in sorted(found)]

    def _clear(self, path: Path) -> str:
        """Undo what a crash left half done; returns what was done."""
        match = ASIDE.fullmatch(path.name)
        target = self.root / step_name(int(match[1])) if match else None
        if target is not None and not target.exists():
            self._files.rename(path, target)
            self._files.sync(self.root)
            return f"put back {target.name}, whose replacement was not finished"
        if path.is_dir():
            self._files.remove_tree(path)
        else:
            self._files.remove(path)
        return f"removed {path.name}, left by a save that did not finish"

    def _apply_retention(self) -> None:
        """Delete complete checkpoints that no rule keeps, up to the current step; never later ones.

        Later ones can only be damaged, since a run resumes from the newest that is whole.
        """
        current = -1 if self._current is None else self._current
        complete = [
            (step, folder)
            for step, folder in self._candidates()
            if step <= current and STEP.fullmatch(folder.name) and _is_complete(folder)
        ]
        keep = steps_to_keep([step for step, _ in complete], self._scores(), self.config)
        for step, folder in complete:
            if step not in keep | self._awaited:
                self._delete(folder, step)

    def _delete(self, folder: Path, step: int) -> None:
        trash = self.root / unique_name(f".trash-{step_name(step)}")
        self._files.rename(folder, trash)
        self._files.remove_tree(trash)

    def _scores(self) -> dict[int, float]:
        """Measured scores by step; none if they are of another metric or can not be read."""
        try:
            document = json.loads((self.root / BEST).read_bytes())
            if document["metric"] != self.config.best_metric:
                return {}
            return {int(step): float(value) for step, value in document["scores"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _write_scores(self, scores: Mapping[int, float]) -> None:
        ranked = rank(scores, self.config)
        document = {
            "best": step_name(ranked[0].step) if ranked else None,
            "metric": self.config.best_metric,
            "mode": self.config.best_mode,
            "scores": {str(step): scores[step] for step in sorted(scores)},
        }
        write_atomically(self.root / BEST, encode_json(document, indent=1), self._files)

    @contextmanager
    def _disk_errors(self, action: str) -> Iterator[None]:
        """Turn errors of the disk into a CheckpointError that says what is still there."""
        try:
            yield
        except Exception as error:
            if not self._is_disk_trouble(error):
                raise
            steps = []
            with suppress(OSError):
                steps = self.steps()
            intact = f"step {steps[-1]} is intact" if steps else "there is no older checkpoint"
            raise CheckpointError(
                f"could not {action} in {self.root}: {error} "
                f"({_free_bytes(self.root) / 2**20:.0f} MiB free); {intact}. "
                "Make room, mend the permissions or lift the limit (ulimit -f), and start the run "
                "again: it resumes."
            ) from error

    def _is_disk_trouble(self, error: Exception) -> bool:
        if isinstance(error, ConnectionError | TimeoutError):
            return False
        if any(text in str(error) for text in DISK_TROUBLE):
            return True  # whatever library, or process of a trainer, it comes from
        if isinstance(error, PacelineError):
            return False
        # Libraries report a full disk as errors of their own.
        return isinstance(error, OSError) or _free_bytes(self.root) < 2**20


def _is_ours(path: Path) -> bool:
    return bool(LEFTOVER.fullmatch(path.name) or ASIDE.fullmatch(path.name))


def _is_complete(folder: Path) -> bool:
    try:
        return not find_damage(folder, read_manifest(folder), with_hashes=False)
    except CheckpointError:
        return False


def _free_bytes(path: Path) -> int:
    existing = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
    return shutil.disk_usage(existing).free
