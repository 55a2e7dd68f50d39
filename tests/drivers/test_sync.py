"""The order of everything in a step, against fakes that log each call."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from drivers.fake_run import Log, drive, make_run, rows

from paceline.drivers import sync
from paceline.errors import DataError, RolloutError, WeightError
from paceline.observe.metrics import Metrics
from paceline.rollout.batch import RolloutBatch


def test_one_step_in_order(tmp_path: Path) -> None:
    run, log = make_run(tmp_path, num_steps=1, save_every=1, eval_every=1)
    drive(run)
    publish = ["pause finish", "send 0", "receive 0", "resume"]
    again = ["pause finish", "send 1", "receive 1", "resume"]
    learn = ["collect 1", "forward_backward", "optim_step"]
    save = ["begin-save", "save", "end-save"]
    assert log == [*publish, "eval 0 version 0", *learn, *save, *again, "eval 1 version 1"]


def test_saves_and_evals_by_schedule_and_on_the_last_step(tmp_path: Path) -> None:
    run, log = make_run(tmp_path, num_steps=5, save_every=2, eval_every=4)
    drive(run)
    # An epoch ends with step 3, which matters only to a run that is as long as its epochs.
    assert log.of("eval") == ["eval 0 version 0", "eval 4 version 4", "eval 5 version 5"]
    assert log.count("save") == 3  # steps 2, 4, 5
    assert run.store.steps()[-1] == 5


def test_each_epoch_saves_and_evaluates_if_the_run_counts_epochs(tmp_path: Path) -> None:
    run, log = make_run(tmp_path, num_steps=6, num_epochs=2, save_every=50, eval_every=50)
    drive(run)
    # 6 prompts, 2 a step: epochs end with steps 3 and 6.
    assert log.of("eval") == ["eval 0 version 0", "eval 3 version 3", "eval 6 version 6"]
    assert run.store.steps() == [3, 6]


def test_never_saves_and_no_evals(tmp_path: Path) -> None:
    run, log = make_run(tmp_path, save_every="never", eval_every=None, eval_first=False)
    drive(run)
    assert not log.of("save", "eval")
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def test_one_row_a_step_with_its_eval(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path)
    drive(run)
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [0, 1, 2, 3, 4]
    assert [row["version"] for row in found] == [0, 1, 2, 3, 4]
    assert [row.get("eval/held/reward") for row in found] == [0.0, None, 0.2, None, 0.4]


def test_eval_only_trains_nothing(tmp_path: Path) -> None:
    run, log = make_run(tmp_path, num_steps=0)
    drive(run)
    assert log.of("eval") == ["eval 0 version 0"]
    assert not log.of("collect", "optim_step", "save")


def test_a_touched_file_asks_for_a_save(tmp_path: Path) -> None:
    (tmp_path / "save").touch()
    run, log = make_run(tmp_path, num_steps=2, save_every="never", eval_every=None)
    drive(run)
    assert log.count("save") == 1
    assert run.store.steps() == [1]
    assert not (tmp_path / "save").exists()
    assert not (tmp_path / "save.claimed").exists()


def test_debug_exit_forces_nothing(tmp_path: Path) -> None:
    run, log = make_run(tmp_path, num_steps=9, save_every=5, eval_every=5, debug_exit_after=2)
    drive(run)
    assert log.of("collect") == ["collect 1", "collect 2"]
    assert log.count("save") == 0


def test_debug_exit_counts_from_this_start(tmp_path: Path) -> None:
    first, _ = make_run(tmp_path, num_steps=9, save_every=1, debug_exit_after=2)
    drive(first)
    second, log = make_run(tmp_path, num_steps=9, save_every=1, debug_exit_after=2)
    drive(second)
    assert log.of("collect") == ["collect 3", "collect 4"]


def test_memory_moves_around_learning(tmp_path: Path) -> None:
    run, log = make_run(tmp_path, num_steps=1, save_every=1, memory="host", eval_every=None)
    drive(run)
    start = log.index("collect 1")
    assert log[start:] == [
        "collect 1",
        "sleep graphs+kv_cache+weights",
        "place device",
        "forward_backward",
        "optim_step",
        "begin-save",
        "save",
        "end-save",
        "place host",
        "wake weights",
        "pause finish",
        "send 1",
        "receive 1",
        "resume",
        "wake graphs+kv_cache",
    ]


def test_a_failing_step_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, num_steps=4, save_every=1)
    run.policy.trainer.fail_step = 3  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="step 3 fails") as caught:
        drive(run)
    assert "in phase 'learn' of step 3, policy 'policy'" in caught.value.__notes__
    assert run.store.steps() == [1, 2]
    again, log = make_run(tmp_path, num_steps=4, save_every=1)
    drive(again)
    assert log.of("collect") == ["collect 3", "collect 4"]
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_failed_publish_does_not_raise_the_version(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, num_steps=2, eval_every=None, eval_first=False)

    async def body() -> None:
        run.policy.engine.fail_receive = OSError("link down")  # type: ignore[attr-defined]
        await sync.drive(run)

    with pytest.raises(WeightError, match="link down"):
        asyncio.run(body())
    assert run.policy.version == -1


@pytest.mark.parametrize(("num_epochs", "num_steps"), [(1, 3), (2, 6)])
def test_the_data_may_end_the_run(tmp_path: Path, num_epochs: int, num_steps: int) -> None:
    run, log = make_run(tmp_path, num_steps=99, num_epochs=num_epochs, save_every=50, eval_every=50)
    drive(run)
    assert len(log.of("collect")) == num_steps
    assert run.store.steps()[-1] == num_steps  # forced: it is the last step
    assert log[-1] == f"eval {num_steps} version {num_steps}"


def test_no_update_at_all_is_an_error(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, num_steps=3, num_epochs=1)
    run.supply.stream.take(6)
    with pytest.raises(DataError, match="without a single update"):
        drive(run)


def test_a_run_that_trained_no_token_is_no_success(tmp_path: Path) -> None:
    run, log = make_run(tmp_path, num_steps=2)
    collect = run.supply.take

    async def masked(step: int) -> RolloutBatch:
        batch = await collect(step)
        for group in batch.groups:
            for sample in group.samples():
                sample.mask = [False] * len(sample.mask)
        return batch

    run.supply.take = masked
    with pytest.raises(RolloutError, match="steps 1 to 2 had no token to train on"):
        drive(run)
    assert log.count("save") == 1  # what there is was saved first


def test_resume_of_a_finished_run_does_nothing(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path)
    drive(run)
    again, log = make_run(tmp_path)
    drive(again)
    assert not log.of("collect", "eval", "save", "optim_step")
    assert again.policy.version == 4


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_resume_continues_as_if_nothing_had_happened(tmp_path: Path, stop_after: int) -> None:
    whole, whole_log = make_run(tmp_path / "whole", num_steps=5, save_every=1)
    drive(whole)
    part, part_log = make_run(
        tmp_path / "part", num_steps=5, save_every=1, debug_exit_after=stop_after
    )
    drive(part)
    rest, rest_log = make_run(tmp_path / "part", num_steps=5, save_every=1)
    drive(rest)
    verbs = ("collect", "eval", "optim_step")
    resumed: Log = Log([*part_log.of(*verbs), *rest_log.of(*verbs)])
    assert resumed == whole_log.of(*verbs)
    assert rest.policy.trainer.weight == whole.policy.trainer.weight  # type: ignore[attr-defined]
    ignore = ("time/", "perf/")

    def kept(folder: Path) -> list[dict[str, float]]:
        return [{k: v for k, v in r.items() if not k.startswith(ignore)} for r in rows(folder)]

    assert kept(tmp_path / "part") == kept(tmp_path / "whole")


class Held:
    """Snapshots whose evals all begin when the one of a given step is taken."""

    def __init__(self, until: int) -> None:
        self._until = until
        self._begun = asyncio.Event()

    async def take(self, step: int) -> int:
        if step == self._until:
            self._begun.set()
        return step

    async def may_begin(self) -> None:
        await self._begun.wait()

    async def retire(self, snapshot: int) -> None: ...


def test_eval_only_with_snapshots_still_gives_its_numbers(tmp_path: Path) -> None:
    run, log = make_run(tmp_path, num_steps=0, snapshots=Held(until=0))
    drive(run)
    assert log.of("eval") == ["eval 0 version 0"]
    assert [row["eval/held/reward"] for row in rows(tmp_path)] == [0.0]


def test_points_that_come_in_together_are_not_averaged(tmp_path: Path) -> None:
    held = Held(until=3)
    run, _ = make_run(tmp_path, num_steps=3, eval_every=1, eval_first=False, snapshots=held)
    drive(run)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    told = {e["step"]: e["values"]["eval/held/reward"] for e in events if e["kind"] == "eval"}
    assert told == {1: 0.1, 2: 0.2}
    assert [row.get("eval/held/reward") for row in rows(tmp_path)] == [None, None, 0.3]
    assert rows(tmp_path)[-1]["eval/held/step"] == 3


def test_a_step_that_left_nothing_to_learn_from_keeps_its_counts(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, num_steps=9, num_epochs=1, save_every=50, eval_every=50)
    collect = run.supply.take

    async def second_is_empty(step: int) -> RolloutBatch:
        if step == 1:
            return await collect(step)
        metrics = Metrics()
        metrics.sum("rollout/dropped_groups/zero_variance", len(run.supply.stream.take(99)))
        return RolloutBatch([], metrics)

    run.supply.take = second_is_empty
    drive(run)
    assert run.store.steps() == [1]
    last = rows(tmp_path)[-1]
    assert (last["step"], last["rollout/dropped_groups/zero_variance"]) == (2, 4)
    assert last["eval/held/reward"] == 0.1
