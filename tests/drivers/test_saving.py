"""A save that goes on in the background: in order, at most one, and nothing of it is ever lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from drivers.fake_joint import Setting, make_world
from drivers.fake_run import Log, LoggedTrainer, drive, make_run, restore, rows

from paceline.drivers import sync
from paceline.drivers.run import Run
from paceline.drivers.saving import Saves
from paceline.drivers.schedule import SaveRequest
from paceline.errors import CheckpointError


class HeldTrainer(LoggedTrainer):
    """Writes in the background when its n-th update is done, or when it is let; or fails to."""

    def __init__(self, log: Log, write_at: int, error: Exception | None) -> None:
        super().__init__(log)
        self.may_write = asyncio.Event()
        self.is_writing = asyncio.Event()
        self._write_at, self._error = write_at, error

    async def forward_backward(self, batch: Any) -> Any:
        if self.fail_step == self.version + 1:
            self.may_write.set()
        return await super().forward_backward(batch)

    async def optim_step(self) -> Any:
        report = await super().optim_step()
        if report.version == self._write_at:
            self.may_write.set()
        return report

    async def save(self, path: Path, later: Any = None) -> None:
        writes: list[Any] = []
        await super().save(path, None if later is None else writes.append)

        async def write() -> None:
            self.is_writing.set()
            await asyncio.wait_for(self.may_write.wait(), 30)
            if self._error is not None:
                raise self._error
            self.calls.append("write")
            await writes[0]()

        if later is not None:
            later(write)


def held(
    folder: Path, *, write_at: int = -1, error: Exception | None = None, **settings: Any
) -> tuple[Run, Log, Any]:
    run, log = make_run(folder, background=True, eval_every=None, **settings)
    run.policy.trainer = HeldTrainer(log, write_at, error)
    return run, log, run.policy.trainer


def full_disk() -> OSError:
    return OSError(28, "No space left on device")


def test_the_run_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    run, log, _ = held(tmp_path, num_steps=3, save_every=2, write_at=3)
    drive(run)
    assert log.index("end-save") < log.index("send 2") < log.index("collect 3") < log.index("write")
    assert run.store.steps() == [2, 3]
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]
    assert sum(row.get("time/save_background_s", 0) for row in rows(tmp_path)) > 0


def test_what_is_written_is_what_there_was_at_the_save(tmp_path: Path) -> None:
    plain, _ = make_run(tmp_path / "plain", num_steps=3, save_every=2, eval_every=None)
    drive(plain)
    run, _, _ = held(tmp_path / "held", num_steps=3, save_every=2, write_at=3)
    drive(run)
    for step in (2, 3):
        for name in ("data.json", "policies/policy/trainer.json"):
            texts = [(r.store.at(step).folder / name).read_text() for r in (plain, run)]
            assert texts[0] == texts[1], (step, name)


def test_the_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    run, log, _ = held(tmp_path, num_steps=3, save_every=1, write_at=2)
    drive(run)
    assert log.of("save", "write") == ["save", "write", "save", "write", "save"]
    assert run.store.steps() == [2, 3]  # keep_last


def test_the_last_save_is_durable_when_it_is_made(tmp_path: Path) -> None:
    run, log, _ = held(tmp_path, num_steps=1, save_every=1)
    drive(run)
    assert log.of("begin-save", "save", "write", "end-save") == ["begin-save", "save", "end-save"]
    assert run.store.steps() == [1]


def test_a_failed_save_ends_the_run_at_the_end_of_the_step(tmp_path: Path) -> None:
    run, log, _ = held(tmp_path, num_steps=9, save_every=2, write_at=3, error=full_disk())
    with pytest.raises(CheckpointError, match=r"could not save step 2.*No space left"):
        drive(run)
    assert log.count("optim_step") in (3, 4)
    assert not list((tmp_path / "checkpoints").glob(".tmp*"))
    assert not run.store.steps()


def test_an_error_of_the_run_lets_the_save_end(tmp_path: Path) -> None:
    run, _, trainer = held(tmp_path, num_steps=9, save_every=2)
    trainer.fail_step = 3
    with pytest.raises(RuntimeError, match="step 3 fails"):
        drive(run)
    assert run.store.steps() == [2]
    assert not list((tmp_path / "checkpoints").glob(".tmp*"))


def test_a_failed_save_is_a_note_on_the_error_of_the_run(tmp_path: Path) -> None:
    run, _, trainer = held(tmp_path, num_steps=9, save_every=2, error=full_disk())
    trainer.fail_step = 3
    with pytest.raises(RuntimeError, match="step 3 fails") as caught:
        drive(run)
    assert "No space left" in caught.value.__notes__[-1]
    assert not run.store.steps()


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_completes_the_save_and_a_second_one_cuts_it_off(tmp_path: Path, times: int) -> None:
    run, _, trainer = held(tmp_path, num_steps=9, save_every=2)

    async def body() -> None:
        driving = asyncio.create_task(sync.drive(run))
        await asyncio.wait_for(trainer.is_writing.wait(), 30)
        for _ in range(times):
            driving.cancel()
            for _ in range(20):
                await asyncio.sleep(0)
        assert driving.done() == (times == 2)
        trainer.may_write.set()
        await asyncio.wait([driving], timeout=30)
        assert driving.cancelled()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(body())
    assert run.store.steps() == ([2] if times == 1 else [])
    assert not list((tmp_path / "checkpoints").glob(".tmp*"))
    run.store.close()
    if times == 1:
        again, _ = make_run(tmp_path, num_steps=9, eval_every=None)
        asyncio.run(restore(again))
        assert again.step == again.policy.trainer.version == 2
        again.store.close()


def test_debug_exit_waits_for_the_save(tmp_path: Path) -> None:
    run, _, trainer = held(tmp_path, num_steps=9, save_every=2, debug_exit_after=2)
    trainer.may_write.set()
    drive(run)
    assert run.store.steps() == [2]


def test_scores_wait_for_their_checkpoint(tmp_path: Path) -> None:
    run, _ = make_run(
        tmp_path, num_steps=4, checkpoint={"best_metric": "eval/held/reward"}, background=True
    )
    drive(run)
    best = run.store.best()
    assert best is not None
    assert best.step == 4
    assert run.store._scores() == {2: 0.2, 4: 0.4}


def test_a_request_during_a_save_is_claimed_after_it(tmp_path: Path) -> None:
    request = SaveRequest(tmp_path / "save")
    request.path.touch()  # type: ignore[union-attr]
    assert request.claim()
    request.serve()
    assert not request.claim(), "the save under way answers it"
    (tmp_path / "save").touch()
    assert request.claim()
    assert (tmp_path / "save").exists(), "it is not ours before the one under way is durable"
    request.acknowledge()
    assert not (tmp_path / "save.claimed").exists()
    assert request.claim()
    request.serve()
    request.acknowledge()
    assert not request.claim()
    assert not list(tmp_path.iterdir())


def test_a_save_that_was_asked_for_is_made_once(tmp_path: Path) -> None:
    (tmp_path / "save").touch()
    run, log, _ = held(tmp_path, num_steps=5, save_every="never", write_at=3)
    drive(run)
    assert log.count("save") == 1
    assert run.store.steps() == [1]
    assert not (tmp_path / "save.claimed").exists()


def test_both_who_wait_see_the_error() -> None:
    async def body() -> None:
        async with Saves(in_background=True) as saves:
            saves.begin(_raises())
            found = await asyncio.gather(saves.settle(), saves.settle(), return_exceptions=True)
            assert [type(error) for error in found] == [OSError, OSError]
            saves.check()

    asyncio.run(body())


async def _raises() -> None:
    raise OSError("full")


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_with_several_policies_the_gate_opens_before_it_is_written(
    tmp_path: Path, is_deterministic: bool
) -> None:
    settings = {"a": Setting(), "b": Setting(), "c": Setting(num_prompts=6, learn_s=3.0)}
    worlds = {}
    for name, background in (("plain", False), ("background", True)):
        world = worlds[name] = make_world(
            tmp_path / name, settings, num_steps=5, eval_every=None,
            background=background, is_deterministic=is_deterministic,
        )  # fmt: skip
        for run in world.runs.values():
            run.policy.trainer.save_s = 0.5  # type: ignore[attr-defined]
        world.drive()
    log = worlds["background"].log
    assert "a-write" in log
    between = log[log.index("c-save") : log.index("c-write")]
    assert any("forward_backward" in entry for entry in between), between
    if is_deterministic:
        assert worlds["plain"].weights() == worlds["background"].weights()
        for step in (2, 4, 5):
            folders = [w.joint.leader.store.at(step).folder for w in worlds.values()]
            for name in ("data.json", "policies/b/trainer.json", "policies/c/trainer.json"):
                assert len({(folder / name).read_text() for folder in folders}) == 1, (step, name)
