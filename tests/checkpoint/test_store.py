from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from crashing import Crash, CrashingFiles, FastFiles

from paceline.checkpoint import CheckpointStore, PolicyProgress, RunState
from paceline.checkpoint.manifest import find_damage
from paceline.checkpoint_settings import CheckpointConfig
from paceline.errors import CheckpointError
from paceline.observe.files import Files

Scenario = Callable[[Path, Files], set[str | None]]
BEST = CheckpointConfig(best_metric="train/loss", best_mode="min", keep_last=1)


def make_store(root: Path, files: Files | None = None, config: CheckpointConfig | None = None):
    return CheckpointStore(root, config or CheckpointConfig(), files or FastFiles())


def save(store: CheckpointStore, step: int, text: str) -> None:
    """Two policies, one file each, then the data state and the run state."""
    with store.staging(step) as staged:
        for name in ("a", "b"):
            folder = staged.policy_folder(name)
            staged.files.write(folder / "weights.bin", f"{text} {name}".encode() * 50)
        staged.write_json("data.json", {"cursor": step})
        progress = {name: PolicyProgress(step, 2 * step) for name in ("a", "b")}
        staged.write_state(RunState(step, "a", progress, seed=0, fingerprint={"text": text}))
        store.commit(staged)


def content(root: Path) -> str | None:
    """What the newest complete checkpoint was saved as, all files compared with each other."""
    found = make_store(root).newest().checkpoint
    if found is None:
        return None
    state = found.state()
    text = str(state.fingerprint["text"])
    assert found.read_json("data.json") == {"cursor": found.step} == {"cursor": state.step}
    for name in ("a", "b"):
        weights = (found.policy_folder(name) / "weights.bin").read_bytes()
        assert weights == f"{text} {name}".encode() * 50
    return text


def first_save(root: Path, files: Files) -> set[str | None]:
    save(make_store(root, files), 1, "one")
    return {None, "one"}


def next_save(root: Path, files: Files) -> set[str | None]:
    save(make_store(root), 1, "one")
    save(make_store(root, files), 2, "two")
    return {"one", "two"}


def save_that_deletes(root: Path, files: Files) -> set[str | None]:
    config = CheckpointConfig(keep_last=1)
    save(make_store(root), 1, "one")
    save(make_store(root), 2, "two")
    save(make_store(root, files, config), 3, "three")
    return {"two", "three"}


def replacing_save(root: Path, files: Files) -> set[str | None]:
    save(make_store(root), 1, "old")
    save(make_store(root, files), 1, "new")
    return {"old", "new"}


def save_and_score(root: Path, files: Files) -> set[str | None]:
    first = make_store(root, config=BEST)
    save(first, 1, "one")
    first.record(1, {"train/loss": 0.5})
    store = make_store(root, files, BEST)
    save(store, 2, "two")
    store.record(2, {"train/loss": 0.9})
    return {"one", "two"}


SCENARIOS = [first_save, next_save, save_that_deletes, replacing_save, save_and_score]


def crashes(
    scenario: Scenario, tmp_path: Path, half_done: bool
) -> Iterator[tuple[Path, set[str | None]]]:
    """The folder after a crash at every operation, with what may be the newest in it."""
    for at in count():
        root = tmp_path / f"{half_done}-{at}" / "checkpoints"
        files = CrashingFiles(at, half_done=half_done)
        try:
            allowed = scenario(root, files)
        except Crash:
            allowed = scenario(tmp_path / f"{half_done}-{at}-allowed", FastFiles())
            yield root, allowed
            continue
        assert at == len(files.log) > 10
        return


@pytest.mark.parametrize("half_done", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_crash_at_any_operation_leaves_the_old_or_the_new_one(
    scenario: Scenario, half_done: bool, tmp_path: Path
) -> None:
    seen = set()
    for root, allowed in crashes(scenario, tmp_path, half_done):
        before = content(root)
        assert before in allowed
        seen.add(before)

        store = make_store(root, config=BEST)
        store.prepare()
        assert content(root) == before, "cleaning must not change what is the newest"
        left = {p.name for p in root.iterdir()}
        assert all(n.startswith("step-") or n in {"latest", "best.json", ".lock"} for n in left), (
            left
        )
        for folder in root.glob("step-*"):
            assert (folder / "manifest.json").exists()

        save(store, 9, "nine")
        assert content(root) == "nine"
        store.close()
    assert seen == allowed, "a crash must be able to hit before and after the commit"


def test_everything_is_synced_before_the_rename_that_commits(tmp_path: Path) -> None:
    files = CrashingFiles()
    save(make_store(tmp_path, files), 3, "three")
    names = [name for name, path in files.log if path == tmp_path / "step-000003"]
    commit = files.log.index(("rename", tmp_path / "step-000003"))
    assert names == ["rename"]
    synced = {path.name for name, path in files.log[:commit] if name == "sync"}
    written = {path.name for name, path in files.log[:commit] if name in {"write", "make_folder"}}
    assert written | {"policies"} == synced
    assert files.log[commit + 1] == ("sync", tmp_path)


def test_the_checkpoint_holds_what_was_written(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save(store, 12, "text")
    found = store.newest()
    assert found.skipped == []
    assert found.checkpoint is not None
    assert found.checkpoint.folder.name == "step-000012"
    assert found.checkpoint.state().policies["b"] == PolicyProgress(step=12, version=24)
    assert (tmp_path / "latest").read_text() == "step-000012\n"
    assert set(found.checkpoint.manifest.files) == {
        "data.json",
        "state.json",
        "policies/a/weights.bin",
        "policies/b/weights.bin",
    }
    with pytest.raises(CheckpointError, match=r"no policy 'c', only \['a', 'b'\]"):
        found.checkpoint.policy_folder("c")


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_truncate, "bytes instead of"),
        (damage_flip, "its hash differs"),
        (Path.unlink, "is missing"),
    ],
)
@pytest.mark.parametrize("file", ["policies/b/weights.bin", "data.json", "state.json"])
def test_a_damaged_file_is_named_and_the_one_before_is_taken(
    damage: Callable[[Path], None], reason: str, file: str, tmp_path: Path
) -> None:
    store = make_store(tmp_path)
    save(store, 1, "one")
    save(store, 2, "two")
    damage(tmp_path / "step-000002" / file)
    found = store.newest()
    assert found.checkpoint is not None
    assert found.checkpoint.step == 1
    assert [(s.folder.name, file in s.reason) for s in found.skipped] == [("step-000002", True)]
    assert reason in found.skipped[0].reason
    with pytest.raises(CheckpointError, match=f"of step 2; step-000002: {file}"):
        store.at(2)


def test_no_flipped_bit_of_a_manifest_goes_unnoticed(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save(store, 1, "one")
    path = tmp_path / "step-000001" / "manifest.json"
    data = path.read_bytes()
    for position in range(len(data) - 1):
        path.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        assert store.newest().checkpoint is None, f"byte {position}"
    path.write_bytes(data)
    assert store.newest().checkpoint is not None


def test_sizes_alone_do_not_see_a_flipped_bit(tmp_path: Path) -> None:
    store = make_store(tmp_path, config=CheckpointConfig(verify="size"))
    save(store, 1, "one")
    damage_flip(tmp_path / "step-000001" / "policies/a/weights.bin")
    assert store.newest().checkpoint is not None
    damage_truncate(tmp_path / "step-000001" / "policies/a/weights.bin")
    assert store.newest().checkpoint is None


def test_a_folder_without_manifest_is_skipped_and_never_deleted(tmp_path: Path) -> None:
    store = make_store(tmp_path, config=CheckpointConfig(keep_last=1))
    foreign = [tmp_path / "step-000001", tmp_path / ".tmp-step-mine", tmp_path / "notes"]
    for folder in foreign:
        folder.mkdir(parents=True)
        (folder / "x").write_text("x")
    assert store.prepare() == []
    save(store, 2, "two")
    save(store, 3, "three")
    damage_truncate(tmp_path / "step-000003" / "data.json")
    reasons = [s.reason for s in store.newest().skipped]
    assert "data.json has" in reasons[0]
    assert reasons[1] == "manifest.json is missing"
    assert all((folder / "x").exists() for folder in foreign)
    store.close()


def test_the_folder_is_gone_after_an_error_or_a_cancellation(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save(store, 1, "one")
    before = sorted(p.name for p in tmp_path.iterdir())

    def failing() -> None:
        with store.staging(2) as staged:
            staged.policy_folder("a")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()

    async def cancelled() -> None:
        with store.staging(2) as staged:
            staged.policy_folder("a")
            await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(cancelled())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    with store.staging(2):
        pass  # never committed
    assert sorted(p.name for p in tmp_path.iterdir()) == before


class FullDisk(FastFiles):
    """Has room until `full` is set."""

    full = False

    def write(self, path: Path, data: bytes) -> None:
        if self.full:
            raise OSError(28, "No space left on device", str(path))
        super().write(path, data)


def test_a_full_disk_is_a_checkpoint_error_and_the_old_one_is_intact(tmp_path: Path) -> None:
    files = FullDisk()
    store = make_store(tmp_path, files)
    save(store, 1, "one")
    files.full = True
    with pytest.raises(CheckpointError, match=r"save step 2.*No space left.*step 1 is intact"):
        save(store, 2, "two")
    assert content(tmp_path) == "one"
    assert not list(tmp_path.glob(".tmp*"))


def test_a_library_that_hides_a_full_disk_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path)
    monkeypatch.setattr("paceline.checkpoint.store._free_bytes", lambda path: 10)
    with (
        pytest.raises(CheckpointError, match=r"unexpected pos.*no older checkpoint"),
        store.staging(1),
    ):
        raise RuntimeError("unexpected pos 64 vs 0")


class NoPermission(FastFiles):
    """The rename that commits is refused."""

    def rename(self, old: Path, new: Path) -> None:
        if new.name == "step-000001" and old.name.startswith(".tmp"):
            raise PermissionError(13, "Permission denied", str(new))
        super().rename(old, new)


def test_a_refused_commit_puts_the_replaced_one_back(tmp_path: Path) -> None:
    save(make_store(tmp_path), 1, "old")
    with pytest.raises(CheckpointError, match=r"Permission denied.*step 1 is intact"):
        save(make_store(tmp_path, NoPermission()), 1, "new")
    assert content(tmp_path) == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000001"]


class NoDeleting(FastFiles):
    def remove_tree(self, path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))


def test_a_failed_deletion_does_not_fail_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(tmp_path, NoDeleting(), CheckpointConfig(keep_last=1))
    save(store, 1, "one")
    save(store, 2, "two")
    assert content(tmp_path) == "two"
    assert "step 2 is saved" in caplog.text


def test_a_second_process_is_refused_and_a_dead_one_is_not_in_the_way(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; "
        "from paceline.checkpoint import CheckpointStore; "
        "from paceline.checkpoint_settings import CheckpointConfig; "
        f"CheckpointStore(Path({str(tmp_path)!r}), CheckpointConfig()).prepare(); "
        "print('ready', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            with pytest.raises(CheckpointError, match=f"process {process.pid} on"):
                make_store(tmp_path).prepare()
        finally:
            process.kill()
    store = make_store(tmp_path)
    assert store.prepare() == []
    assert store.prepare() == []
    store.close()


def test_a_step_is_read_by_number(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    assert store.newest().checkpoint is None
    with pytest.raises(CheckpointError, match="steps that exist: none"):
        store.at(1)
    save(store, 1, "one")
    save(store, 2, "two")
    assert store.at(1).state().fingerprint == {"text": "one"}
    assert store.steps() == [1, 2]
    with pytest.raises(CheckpointError, match="steps that exist: 1, 2"):
        store.at(7)


def test_policy_names_stay_inside_the_folder(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    with pytest.raises(CheckpointError, match="can not name a folder"), store.staging(1) as staged:
        staged.policy_folder("../x")


def test_a_manifest_of_another_step_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save(store, 1, "one")
    (tmp_path / "step-000001").rename(tmp_path / "step-000005")
    found = store.newest()
    assert found.checkpoint is None
    assert found.skipped[0].reason == "its manifest is of step 1"


def test_a_manifest_of_another_format_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.checkpoint.manifest.FORMAT", 7)
    save(make_store(tmp_path), 1, "one")
    monkeypatch.undo()
    reason = make_store(tmp_path).newest().skipped[0].reason
    assert reason == "manifest.json has format 7, this version of Paceline reads 1"


def test_damage_is_found_without_reading_all_files_first(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save(store, 1, "one")
    found = store.newest().checkpoint
    assert found is not None
    assert found.manifest.num_bytes == sum(
        p.stat().st_size for p in found.folder.rglob("*") if p.is_file() and p.name[0] != "m"
    )
    (found.folder / "extra.txt").write_text("a note of the user")
    assert find_damage(found.folder, found.manifest, with_hashes=True) == []


def test_state_json_is_for_people_too(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save(store, 1, "one")
    text = (tmp_path / "step-000001" / "state.json").read_text()
    assert json.loads(text)["format"] == 1
    assert "\n" in text.strip()
